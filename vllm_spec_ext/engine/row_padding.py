# SPDX-License-Identifier: Apache-2.0
"""Rows that are added to a small step because more of them take less time.

A CPU's matrix kernels may be slower with one or two rows than with four: oneDNN's in float32 took
1.25 times as long on an AMD EPYC. vLLM can run steps with more rows than tokens (it pads batches
for CUDA graphs and between data-parallel ranks); what comes of the added ones is not looked at.
Whether and how far to pad is measured at start, on the model's own layers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.forward_context import BatchDescriptor

_MOST_ROWS = 8
_LEAST_WEIGHTS = 16 << 20  # of all layers; fewer lie in a processor's caches
_MOST_WEIGHTS = 32 << 20  # of the layers that are measured
_REPEATS = 11
_LEAST_GAIN = 0.05  # of the time of the layers


class Layer(NamedTuple):
    """A product with a weight matrix."""

    product: Callable[[torch.Tensor], torch.Tensor]  # [rows, num_inputs] to [rows, num_outputs]
    num_inputs: int
    num_outputs: int
    dtype: torch.dtype


class RowPadding:
    """How many rows a step of few tokens should have."""

    def __init__(self, quickest: Sequence[int]) -> None:
        """Use a table.

        Args:
            quickest: Rows by tokens from 0 on, each at least as many.
        """
        self.quickest = tuple(quickest)

    def __str__(self) -> str:
        raised = [f"{rows} for {n}" for n, rows in enumerate(self.quickest) if rows != n]
        return ", ".join(raised)

    @classmethod
    def measured(
        cls, layers: Sequence[Layer], clock: Callable[[], float] = time.perf_counter
    ) -> "RowPadding | None":
        """Time products with some rows; takes a second or so.

        More rows are taken only where they were quicker at their best, and in most of the rounds
        by themselves: beside other programs, as where several engines start, each alone finds a
        gain where there is none, and rows that gain nothing cost a fifth of each step.

        Args:
            layers: The model's.
            clock: Seconds.

        Returns:
            None if nothing is gained, or the model is too small to tell.
        """
        if sum(layer.num_inputs * layer.num_outputs for layer in layers) < _LEAST_WEIGHTS:
            return None
        some, num_weights = [], 0
        for layer in layers:
            some.append(layer)
            num_weights += layer.num_inputs * layer.num_outputs
            if num_weights >= _MOST_WEIGHTS:
                break
        counts = range(1, _MOST_ROWS + 1)
        rounds: list[list[float]] = []  # seconds by rows, less one
        with torch.inference_mode():
            inputs = {
                # Not drawn: vLLM has set the seed by now.
                (layer.num_inputs, layer.dtype): torch.ones(
                    _MOST_ROWS, layer.num_inputs, dtype=layer.dtype
                )
                for layer in some
            }
            for _ in range(_REPEATS):  # in turns, so that a pause hits one of many
                rounds.append([])
                for count in counts:
                    started = clock()
                    for layer in some:
                        layer.product(inputs[layer.num_inputs, layer.dtype][:count])
                    rounds[-1].append(clock() - started)
        quickest = [0, *(_quickest(rounds, count) for count in counts)]
        return None if quickest == [0, *counts] else cls(quickest)

    def pad(self, decision: tuple[Any, ...]) -> tuple[Any, ...]:
        """What vLLM decided of a step, with the rows of its batch raised.

        Args:
            decision: Of ``_determine_batch_execution_and_padding`` (vLLM 0.32): the second is a
                ``BatchDescriptor``.
        """
        batch: BatchDescriptor
        mode, batch, *rest = decision
        if batch.num_tokens >= len(self.quickest):
            return decision
        rows = self.quickest[batch.num_tokens]
        return (mode, replace(batch, num_tokens=rows), *rest)


def _quickest(rounds: Sequence[Sequence[float]], count: int) -> int:
    """Rows that a step of so many tokens should have.

    Args:
        rounds: Of each the seconds by rows, from one row on.
        count: Tokens.
    """
    least = [min(seconds) for seconds in zip(*rounds, strict=True)]
    quickest, best = count, 1.0 - _LEAST_GAIN
    for more in range(count + 1, _MOST_ROWS + 1):
        usual = median(seconds[more - 1] / seconds[count - 1] for seconds in rounds)
        if max(usual, least[more - 1] / least[count - 1]) < best:
            quickest, best = more, usual
    return quickest


def may_pad(config: "VllmConfig") -> bool:
    """Whether a runner's steps may have more rows than tokens.

    Not where ranks would have to agree on it, nor with adapters, whose kernels want as many rows
    as tokens, nor where a row more reads the weights of further experts.
    """
    parallel = config.parallel_config
    return (
        parallel.world_size_across_dp == 1
        and config.scheduler_config.max_num_batched_tokens >= _MOST_ROWS
        and config.lora_config is None
        and not config.model_config.is_moe
    )


def linear_layers(model: torch.nn.Module) -> Iterator[Layer]:
    """Linear layers of a model that vLLM has prepared for a CPU; others say nothing.

    (vLLM 0.32 ``dispatch_cpu_unquantized_gemm``.)

    Args:
        model: Of one that sees or hears, the part that writes: small steps run no others.
    """
    model = getattr(model, "get_language_model", lambda: model)()
    for module in model.modules():
        product = getattr(module, "cpu_linear", None)
        num_inputs = getattr(module, "input_size_per_partition", None)
        num_outputs = getattr(module, "output_size_per_partition", None)
        if product is None or num_inputs is None or num_outputs is None:
            continue
        weight = module.weight

        def multiply(rows: torch.Tensor, product: Any = product, weight: Any = weight) -> Any:
            return product(rows, weight, None)

        yield Layer(multiply, num_inputs, num_outputs, module.params_dtype)
