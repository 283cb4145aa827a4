# SPDX-License-Identifier: Apache-2.0
"""The runner mixin: turns vLLM's V1 model runner into one that feeds our proposers.

Every override calls ``super()`` or replaces a step that vLLM reserves for the drafter; none copies
vLLM code. Each has the name of the method of ``GPUModelRunner`` that it replaces (vLLM 0.32). What
they do is elsewhere: :mod:`.step` is the step, :mod:`.requests.state` a request,
:mod:`.verifying.verifier` verifies, :mod:`.drafting.step_drafts` drafts, :mod:`.trees` lays out.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_spec_ext.engine.drafting.drafter import Drafter
from vllm_spec_ext.engine.drafting.step_drafts import StepDrafts
from vllm_spec_ext.engine.models.target_states import default_layers
from vllm_spec_ext.engine.requests.state import RequestState, RequestStates
from vllm_spec_ext.engine.starting.kv_setup import use_scratch
from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.trees.attention import TreeAttention, with_scratch
from vllm_spec_ext.engine.trees.cuda_graphs import no_full_graph
from vllm_spec_ext.engine.verifying.verifier import Verifier
from vllm_spec_ext.engine.watching.step_log import StepLog

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


class SpecRunnerMixin:
    """Mixed in front of ``CPUModelRunner`` or ``GPUModelRunner`` by :func:`specialise`."""

    # Attributes of vLLM's runner that the overrides read; listed in compat/reads.py.
    drafter: Drafter
    device: torch.device
    input_batch: "InputBatch"
    requests: dict[str, "CachedRequestState"]
    sampler: "Sampler"
    max_model_len: int
    speculative_config: SpecExtConfig
    vllm_config: "VllmConfig"
    cudagraph_dispatcher: "CudagraphDispatcher"
    query_start_loc: "CpuGpuBuffer"
    discard_request_mask: "CpuGpuBuffer"
    get_kv_cache_spec: Callable[[], dict[str, "KVCacheSpec"]]
    get_model: Callable[[], torch.nn.Module]
    use_aux_hidden_state_outputs: bool

    kv_by_layer: dict[str, torch.Tensor]  # our own: caches by the scheduler's blocks

    def init_spec_ext(self) -> None:
        """State of our own; called once, right after the runner was specialised."""
        self.spec_step = Step()
        self.spec_states = RequestStates(self.speculative_config.spec_ext)
        self.tree_attention: TreeAttention | None = None
        self.verifier = Verifier(self)
        self.step_drafts = StepDrafts(self)
        self.step_log: StepLog | None = None
        # vLLM asks its target for hidden states of its layers if this is set.
        if self.drafter.models.reads_layers:
            self.use_aux_hidden_state_outputs = True

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        """Layers of the target whose hidden states the draft models read."""
        return self.drafter.models.state_layers(default_layers(self.get_model()))

    def state_of(self, request_id: str) -> RequestState:
        """What we keep of a request."""
        return self.spec_states.of(request_id, self)

    def initialize_kv_cache(
        self, kv_cache_config: "KVCacheConfig", *args: Any, **kwargs: Any
    ) -> None:
        """Add the scratch blocks of draft trees and models behind the request blocks."""
        is_profiling = bool(args and args[0]) or kwargs.get("is_profiling", False)
        num_scratch = 0 if is_profiling else self.drafter.num_scratch_blocks
        first = kv_cache_config.num_blocks
        kv_cache_config = with_scratch(kv_cache_config, num_scratch)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        if num_scratch:
            self.tree_attention = use_scratch(self, range(first, first + num_scratch))

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Keep which cache is whose."""
        allocate = super().initialize_kv_cache_tensors  # type: ignore[misc]
        self.kv_by_layer = allocate(*args, **kwargs)
        return self.kv_by_layer

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Callable[[], None] | None:
        """Requests come and go; free the proposer's state of those that went.

        A streaming-input session goes on under its id with other tokens: what it answered becomes
        prompt, the last token is taken back, and options may change. Like vLLM
        (``_update_streaming_request``) we know it by a new request with a known id; for the
        proposer the turn before is finished, and the next one is a request of its own.
        """
        gone = set(scheduler_output.finished_req_ids)
        gone.update(scheduler_output.preempted_req_ids or ())
        sent = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        gone.update(sent & self.requests.keys())
        if gone:
            self.drafter.finish(sorted(gone))
            self.step_drafts.forget(gone)
            self.spec_states.forget(gone)
            self.verifier.budgets.forget(gone)
            if self.step_log is not None:
                self.step_log.forget(sorted(gone))
        self.drafter.blocks_change(scheduler_output, sorted(gone))
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _prepare_inputs(
        self, scheduler_output: "SchedulerOutput", num_scheduled_tokens: np.ndarray
    ) -> Any:
        """A step begins; where drafts branch, a tree plan replaces vLLM's chain layout."""
        started = time.perf_counter()
        result = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens
        )
        step = self.spec_step = Step.of(self.input_batch.req_ids, scheduler_output, started)
        if self.tree_attention is not None:
            parents = [
                self.state_of(request_id).parents_of(draft) if draft else None
                for request_id, draft in zip(step.request_ids, step.drafts, strict=True)
            ]
            self.tree_attention.plan_step(parents, step.drafts, num_scheduled_tokens.tolist())
        return result

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """A full CUDA graph has a fixed number of requests, so not with virtual ones."""
        determine = super()._determine_batch_execution_and_padding  # type: ignore[misc]
        if self.tree_attention is None or self.tree_attention.plan is None:
            return determine(*args, **kwargs)
        with no_full_graph(self.cudagraph_dispatcher):
            return determine(*args, **kwargs)

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: "SpecDecodeMetadata | None"
    ) -> "SamplerOutput":
        """Verify the drafts of the step, see :class:`.verifying.verifier.Verifier`."""
        self.spec_step.hold_back(self.input_batch.generators, self.discard_request_mask.np)
        stock = super()._sample  # type: ignore[misc]
        return self.verifier.sample(self.spec_step, logits, spec_decode_metadata, stock)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Give the generators that were held back to their requests again."""
        result = super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
        self.input_batch.generators.update(self.spec_step.held_generators)
        return result

    def _get_spec_decode_draft_probs(
        self, spec_decode_metadata: "SpecDecodeMetadata"
    ) -> torch.Tensor | None:
        """Distributions of drawn drafts for vLLM's rejection sampler."""
        return self.verifier.draft_probs(self.spec_step)

    def _input_fits_in_drafter(
        self, common_attn_metadata: "CommonAttentionMetadata | None"
    ) -> bool:
        """vLLM drops the drafts of *all* requests when one nears ``max_model_len``.

        Ours are limited request by request instead, see :class:`.drafting.step_drafts.StepDrafts`.
        """
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: "SchedulerOutput",
        sampled_token_ids: list[list[int]],
        sampling_metadata: "SamplingMetadata",
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: "SpecDecodeMetadata | None",
        common_attn_metadata: "CommonAttentionMetadata | None",
        slot_mappings: Any,
    ) -> list[list[int]]:
        """Draft tokens of each request of the batch, in batch order.

        Args:
            sampled_token_ids: New tokens of each request; empty for rows of an unfinished prefill.
            hidden_states: [num_rows, hidden] of the target's final layer.
            sample_hidden_states: [num_sampled_rows, hidden] of the target's final layer.
            aux_hidden_states: [num_rows, hidden] of each layer that EAGLE-3 heads read.
        """
        self.drafter.models.see(hidden_states, aux_hidden_states)
        if self.drafter.views and self.tree_attention is not None:
            self.tree_attention.end_step()
        limit = scheduler_output.num_spec_tokens_to_schedule
        drafts, probs = self.drafter.ranks.lead(
            lambda: self.step_drafts.decide(
                self.spec_step, sampled_token_ids, sample_hidden_states, limit
            )
        )
        made, rest = iter(drafts), iter(probs)
        result: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, tokens in enumerate(sampled_token_ids):
            if tokens:
                draft = next(made)
                result[row] = draft.tokens
                state = self.state_of(draft.request_id)
                state.draft, state.probs = draft, next(rest) if draft.drawn is not None else None
        return result
