# SPDX-License-Identifier: Apache-2.0
"""Full CUDA graphs of the V2 runner: for steps of any draft lengths, and not for branches.

vLLM captures full graphs for steps in which every request verifies as many tokens as there can be.
Scheduled step by step our requests verify what pays, often nothing; without a full graph such a
step launches every layer's attention by itself, which took twice as long as all the rest of it
(SmolLM2-135M on an H200, docs/gpu.md). vLLM has graphs for steps of mixed lengths (0.32
``CudaGraphManager.varlen_decode``), but takes them for its own adaptive verification alone.
"""

from abc import ABC
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from vllm_spec_ext.engine.v2.runner import SpecRunnerV2Mixin

REPLAYING = ("TRITON_ATTN", "FLASH_ATTN")
"""Attention backends whose full graphs gave plain decoding's tokens at any length, on an H200.

FlashAttention 3 gave other texts there before :class:`PromisedLengthMixin`: its schedule was made
for the longest request of the step, and the graph for the longest one that there can be.
"""


MOST_PADDED = 8  # requests


def no_trees_reason(graphs: CUDAGraphMode) -> str | None:
    """Why steps cannot have branches; None if they can.

    vLLM takes a full graph for every step where it makes no others, and there is nothing else to
    fall back to.
    """
    if graphs.has_full_cudagraphs() and not graphs.has_piecewise_cudagraphs():
        return f"cudagraph_mode is {graphs}; choose FULL_AND_PIECEWISE or PIECEWISE"
    return None


class _Graphs(ModelCudaGraphManager):
    """In the place of what vLLM made for the same engine; nothing is captured yet."""

    of_any_length = False

    def __init__(self, made: ModelCudaGraphManager) -> None:
        super().__init__(
            made.vllm_config,
            made.device,
            made.cudagraph_mode,
            made.decode_query_len,
            lora_capture_cases=made.lora_capture_cases,
            varlen_decode=self.of_any_length,
            ubatch_runner=made.ubatch_runner,
        )


class NearbyGraphs(_Graphs):
    """vLLM's graphs of steps of a few lengths, of which a step takes one that is larger, too.

    vLLM 0.32 looks at the next larger size alone. That may be captured for another length, so that
    25 requests with a token each got none: there was one for 27 tokens, of three requests. And of
    the lengths in the table of widths it captures the largest batch that the table gives them,
    which for steps without drafts is that of one request in an engine all of whose batches draft.
    """

    def __init__(self, made: ModelCudaGraphManager) -> None:
        """Stand in for what vLLM made, with graphs for as many requests as there can be."""
        config = made.vllm_config.compilation_config
        sizes, most = config.cudagraph_capture_sizes, made.max_num_reqs
        fullest = {most, most * made.decode_query_len}
        if sizes:
            config.cudagraph_capture_sizes = sorted(
                {*sizes, *(size for size in fullest if size <= config.max_cudagraph_capture_size)}
            )
        try:
            super().__init__(made)  # reads them
        finally:
            config.cudagraph_capture_sizes = sizes

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> BatchExecutionDescriptor:
        """As vLLM's, then as if up to :data:`MOST_PADDED` more requests took part."""
        rest = (uniform_token_count, num_active_loras, max_query_len, num_ubatches)
        found: BatchExecutionDescriptor = super().dispatch(num_reqs, num_tokens, *rest)
        if uniform_token_count is None or found.cg_mode == CUDAGraphMode.FULL:
            return found
        for more in range(1, MOST_PADDED + 1):
            padded = num_tokens + more * uniform_token_count
            larger: BatchExecutionDescriptor = super().dispatch(num_reqs, padded, *rest)
            if larger.cg_mode == CUDAGraphMode.FULL:
                return larger
        return found


class AnyLengthGraphs(_Graphs):
    """Full graphs that replay decoding steps of 1 to ``decode_query_len`` tokens a request."""

    of_any_length = True

    def __init__(self, made: ModelCudaGraphManager, has_trees: Callable[[], bool]) -> None:
        """Stand in for what vLLM made.

        Args:
            made: vLLM's own, of the same engine.
            has_trees: Whether the step for which a graph is wanted has branches.
        """
        super().__init__(made)
        self._has_trees = has_trees

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> BatchExecutionDescriptor:
        """As vLLM's; a step with branches gets no full graph.

        Such a graph has a fixed number of requests, and runs nothing of ours when KV is written.
        """
        if self._has_trees():
            max_query_len = None  # as vLLM says of a step with a prefill
        return super().dispatch(
            num_reqs,
            num_tokens,
            uniform_token_count,
            num_active_loras,
            max_query_len,
            num_ubatches,
        )


class PromisedLengthMixin(ABC):  # noqa: B024
    """Mixed in front of a target's ``ModelState``: a full graph gets what it was captured for.

    Abstract like that: Python exchanges an object's class only for one of the same layout.
    """

    def promise(self, num_tokens: int) -> None:
        """State of our own: tokens of the longest request that the graphs can replay."""
        self.promised_tokens = num_tokens

    def prepare_attn(
        self, input_batch: "InputBatch", cudagraph_mode: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """As vLLM does for its own steps of mixed lengths (0.32 ``InputBatch.max_query_len``)."""
        if cudagraph_mode == CUDAGraphMode.FULL:
            input_batch = replace(input_batch, max_query_len=self.promised_tokens)
        return super().prepare_attn(input_batch, cudagraph_mode, *args, **kwargs)  # type: ignore[misc]


def take_any_length(runner: "SpecRunnerV2Mixin") -> None:
    """Put graphs of any length in the place of the runner's, where its attention can replay them.

    With asynchronous scheduling every request does verify as many tokens, as vLLM expects; where
    that number changes by the step, :class:`NearbyGraphs`.

    Args:
        runner: Its KV cache initialised, its graphs not captured.
    """
    made = runner.cudagraph_manager
    mode = made.cudagraph_mode
    if (
        not mode.separate_routine()
        or mode.decode_mode() != CUDAGraphMode.FULL
        or runner.vllm_config.cache_config.kv_sharing_fast_prefill  # keeps vLLM's manager
    ):
        return
    if runner.is_async:
        if runner.speculative_config.num_speculative_tokens_per_batch_size is not None:
            runner.cudagraph_manager = NearbyGraphs(made)
        return
    if not _can_replay(runner, made.decode_query_len):
        return
    runner.cudagraph_manager = AnyLengthGraphs(made, runner.has_trees)
    _promise(runner.model_state, made.decode_query_len)


def _promise(model_state: "DefaultModelState | PromisedLengthMixin", num_tokens: int) -> None:
    # vLLM makes its graphs twice, at first to measure their memory, and keeps the model's state.
    if not isinstance(model_state, PromisedLengthMixin):
        base = type(model_state)
        model_state.__class__ = type(f"Promised{base.__name__}", (PromisedLengthMixin, base), {})
    cast(PromisedLengthMixin, model_state).promise(num_tokens)


def _can_replay(runner: "SpecRunnerV2Mixin", decode_query_len: int) -> bool:
    groups = runner.attn_groups
    if any(group.backend.get_name() not in REPLAYING for each in groups for group in each):
        return False
    unsupported = get_varlen_cudagraph_unsupported_backend(
        groups, runner.vllm_config, decode_query_len
    )
    return unsupported is None
