# SPDX-License-Identifier: Apache-2.0
"""How long a forward pass takes on a GPU, on paper: bytes, operations and launches.

A pass reads the weights once and the KV cache of every request, and computes for every row. It
takes the longer of the two at what a GPU really reaches, and what launching its kernels adds:

    seconds = max(bytes / bandwidth, operations / speed) + layers * layer_us + forward_us

Without CUDA graphs Python launches every kernel. That runs beside the GPU, so the pass takes at
least ``layers * eager_layer_us + forward_us``: long passes hide it, short ones (a view of the
cache, a draft model) do not.

approximation: one GPU; no traffic between several, no prefill, no scheduler. Nothing here was
measured: these are published figures of the hardware and round numbers for what is reached of them.
"""

from dataclasses import dataclass, replace

from vllm_spec_ext.bench.model_shape import ModelShape
from vllm_spec_ext.errors import SpecExtError, UnknownNameError

GRAPH_LAYER_US = 10.0
EAGER_LAYER_US = 300.0
FORWARD_US = 200.0

FIGURES = {
    "memory": "memory_bytes",
    "bandwidth": "bandwidth",
    "flops": "flops",
    "bandwidth_share": "bandwidth_share",
    "flops_share": "flops_share",
    "layer_us": "layer_us",
    "forward_us": "forward_us",
    "eager_layer_us": "eager_layer_us",
}
"""What a command line may change, and the field that holds it."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, and what an engine adds to each forward pass on it.

    The three launch figures are estimates for vLLM. For a 7B model of 32 layers they are 0.5 ms a
    pass with CUDA graphs, and 10 ms of Python without.
    """

    name: str
    memory_bytes: float
    bandwidth: float  # bytes a second, as published
    flops: float  # 16-bit operations a second, dense, as published
    bandwidth_share: float = 0.8
    """Of the published bandwidth, reached by decoding."""
    flops_share: float = 0.5
    """Of the published operations, reached by narrow matrix products."""
    layer_us: float = GRAPH_LAYER_US
    """Per layer, for starting its kernels one after the other in a CUDA graph."""
    forward_us: float = FORWARD_US
    """Per pass: its input, the vocabulary's logits, sampling, what Python does between passes."""
    eager_layer_us: float = 0.0
    """Per layer, for launching its kernels from Python; 0: passes are CUDA graphs."""

    def eager(self) -> "Gpu":
        """The same without CUDA graphs."""
        return replace(self, eager_layer_us=self.eager_layer_us or EAGER_LAYER_US)

    def forward_s(self, model: ModelShape, rows: int, batch_size: int, context: float) -> float:
        """Seconds of a forward pass.

        Args:
            model: Whose.
            rows: Tokens that it computes, over all requests.
            batch_size: Requests.
            context: Tokens of each request whose KV it reads.

        approximation: KV of the new rows themselves is left out.
        """
        moved = model.read_bytes + batch_size * context * model.kv_bytes
        operations = rows * (model.row_flops + context * model.attention_flops)
        working = max(
            moved / (self.bandwidth * self.bandwidth_share),
            operations / (self.flops * self.flops_share),
        )
        on_gpu = working + model.num_layers * self.layer_us / 1e6
        on_host = model.num_layers * self.eager_layer_us / 1e6
        return max(on_gpu, on_host) + self.forward_us / 1e6

    def reading_s(self, num_bytes: float) -> float:
        """Seconds to read so much memory."""
        return num_bytes / (self.bandwidth * self.bandwidth_share)


GPUS = {
    # NVIDIA A100 datasheet, 80GB SXM: 2,039 GB/s, 312 TFLOPS in 16 bits.
    "a100": Gpu("a100", 80e9, 2.039e12, 312e12),
    # NVIDIA H100 datasheet, SXM: 3.35 TB/s, 1,979 TFLOPS in 16 bits with sparsity, half without.
    "h100": Gpu("h100", 80e9, 3.35e12, 989.5e12),
    # NVIDIA H200 datasheet, SXM: 141 GB, 4.8 TB/s, the operations of an H100.
    "h200": Gpu("h200", 141e9, 4.8e12, 989.5e12),
}


def find(text: str) -> Gpu:
    """A GPU by name, with other figures where some are given: ``h100,bandwidth=2e12,memory=40e9``.

    Raises:
        SpecExtError: No such GPU or figure.
    """
    name, *pairs = [part.strip() for part in text.split(",")]
    if name not in GPUS:
        raise UnknownNameError("GPU", name, GPUS)
    found: dict[str, float] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in FIGURES:
            raise UnknownNameError("figure of a GPU", key, FIGURES)
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0.0 <= number < float("inf") or (number == 0.0 and not key.endswith("_us")):
            raise SpecExtError(f"{pair!r}: expected {key}=NUMBER, above zero")
        found[FIGURES[key]] = number
    return replace(GPUS[name], name=text, **found)
