# SPDX-License-Identifier: Apache-2.0
"""The runner mixin: turns vLLM's V1 model runner into one that feeds our proposers.

Every override calls ``super()`` or replaces a step that vLLM reserves for the drafter; none copies
vLLM code. Each has the name of the method of ``GPUModelRunner`` that it replaces (vLLM 0.32). What
they do is elsewhere: :mod:`.step` is the step, :mod:`.requests.state` a request,
:mod:`.verifying.verifier` verifies, :mod:`.drafting.step_drafts` drafts, :mod:`.trees` lays out.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import ModelRunnerOutput

from vllm_spec_ext.engine.drafting.drafter import Drafter
from vllm_spec_ext.engine.drafting.step_drafts import StepDrafts
from vllm_spec_ext.engine.models.batch_events import BatchRow, batch_rows
from vllm_spec_ext.engine.models.kv_binding import KvParts
from vllm_spec_ext.engine.models.target_states import default_layers
from vllm_spec_ext.engine.placeholders import without_placeholders
from vllm_spec_ext.engine.requests.batch_request import known_request
from vllm_spec_ext.engine.requests.leaving import leaving_requests, let_go
from vllm_spec_ext.engine.requests.state import KnownRequest, RequestState, RequestStates
from vllm_spec_ext.engine.row_padding import RowPadding
from vllm_spec_ext.engine.starting.kv_setup import add_scratch, use_scratch
from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.trees.attention import TreeAttention
from vllm_spec_ext.engine.trees.cuda_graphs import no_full_graph
from vllm_spec_ext.engine.verifying.plain_metadata import PlainMetadata
from vllm_spec_ext.engine.verifying.stop_tokens import end_at_stop_tokens
from vllm_spec_ext.engine.verifying.verifier import Verifier
from vllm_spec_ext.engine.watching.stat_channel import put_news
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
    from vllm.v1.worker.utils import AttentionGroup


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
    positions: torch.Tensor
    cudagraph_dispatcher: "CudagraphDispatcher"
    query_start_loc: "CpuGpuBuffer"
    discard_request_mask: "CpuGpuBuffer"
    get_kv_cache_spec: Callable[[], dict[str, "KVCacheSpec"]]
    get_model: Callable[[], torch.nn.Module]
    use_aux_hidden_state_outputs: bool
    attn_groups: "list[list[AttentionGroup]]"
    _kernel_block_sizes: list[int]

    kv_by_layer: dict[str, torch.Tensor]  # our own: caches by the scheduler's blocks

    def init_spec_ext(self) -> None:
        """State of our own; called once, right after the runner was specialised."""
        self.spec_step = Step()
        self.spec_states = RequestStates(self.speculative_config.spec_ext)
        self.tree_attention: TreeAttention | None = None
        self.verifier = Verifier(self)
        self.step_drafts = StepDrafts(self)
        self.step_log: StepLog | None = None
        self.is_warming_up = False  # the V1 runner makes up batches for that, not requests
        self.row_padding: RowPadding | None = None
        self._plain_metadata = PlainMetadata()
        # vLLM asks its target for hidden states of its layers if this is set.
        if self.drafter.models.reads_layers:
            self.use_aux_hidden_state_outputs = True

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        """Layers of the target whose hidden states the draft models read."""
        return self.drafter.models.state_layers(default_layers(self.get_model()))

    def state_of(self, request_id: str) -> RequestState:
        """What we keep of a request."""
        return self.spec_states.of(request_id, self)

    def known(self, request_id: str) -> KnownRequest:
        """A request of the batch; after the bookkeeping with the step's new tokens."""
        return known_request(self.input_batch, self.requests[request_id])

    def rows_of(self, step: Step, new_tokens: list[list[int]]) -> list[BatchRow]:
        """The requests of a batch after its step, for draft models and views."""
        return batch_rows(self, step, new_tokens, self.drafter.models.group)

    def initialize_kv_cache(
        self, kv_cache_config: "KVCacheConfig", *args: Any, **kwargs: Any
    ) -> None:
        """Add the scratch blocks of draft trees and models behind the request blocks."""
        initialize = super().initialize_kv_cache  # type: ignore[misc]
        scratch = add_scratch(self, initialize, kv_cache_config, *args, **kwargs)
        if scratch:
            sizes = [table.block_size for table in self.input_batch.block_table.block_tables]
            kv = KvParts(self.kv_by_layer, sizes, self._kernel_block_sizes)
            self.tree_attention = use_scratch(self, kv, scratch)

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Keep which cache is whose."""
        allocate = super().initialize_kv_cache_tensors  # type: ignore[misc]
        self.kv_by_layer = allocate(*args, **kwargs)
        return self.kv_by_layer

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """A step, or its first half; what was counted goes along with the answer.

        Here and not in the worker, as vLLM's Ray executor calls the runner itself (0.32
        ``RayWorkerWrapper.execute_model_ray``).
        """
        if self.step_drafts.budget is not None:
            scheduler_output = without_placeholders(scheduler_output)
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        return put_news(output, self.drafter.counts)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The second half, which drafts; the same."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if isinstance(output, ModelRunnerOutput) and output.sampled_token_ids:
            end_at_stop_tokens(output.sampled_token_ids, self.spec_step.states)
        return put_news(output, self.drafter.counts)

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Callable[[], None] | None:
        """Requests come and go; free the proposer's state of those that went."""
        gone = leaving_requests(self, scheduler_output, self.requests)
        if gone:
            let_go(self, gone)
            self.verifier.budgets.forget(gone)
        self.drafter.blocks_change(scheduler_output, gone)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _prepare_inputs(
        self, scheduler_output: "SchedulerOutput", num_scheduled_tokens: np.ndarray
    ) -> Any:
        """A step begins; where drafts branch, a tree plan replaces vLLM's chain layout."""
        started = time.perf_counter()
        result = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens
        )
        step = self.spec_step = Step.of(
            self.input_batch.req_ids, scheduler_output, started, self.state_of
        )
        if self.tree_attention is not None:
            self._lay_out_trees(self.tree_attention, step)
        return result

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> "SpecDecodeMetadata":
        """Which rows verify what."""
        calculate = super()._calc_spec_decode_metadata  # type: ignore[misc]
        return self._plain_metadata.of(num_draft_tokens, cu_num_scheduled_tokens, calculate)

    def _lay_out_trees(self, trees: TreeAttention, step: Step) -> None:
        trees.end_step()
        if not any(step.parents):
            return
        batch, count = self.input_batch, len(step.request_ids)
        computed = batch.num_computed_tokens_cpu[:count].tolist()
        table = batch.block_table[0]
        starts = self.query_start_loc.np[:count].tolist()
        trees.plan_step(step, starts, computed, table.block_table.np)
        if trees.plan is not None:
            trees.begin(self.positions, table.slot_mapping.gpu)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """A full CUDA graph has a fixed number of requests, so not with virtual ones; small steps
        of a CPU have as many rows as are quickest."""
        determine = super()._determine_batch_execution_and_padding  # type: ignore[misc]
        has_trees = self.tree_attention is not None and self.tree_attention.plan is not None
        with no_full_graph(self.cudagraph_dispatcher) if has_trees else nullcontext():
            decision = determine(*args, **kwargs)
        return decision if self.row_padding is None else self.row_padding.pad(decision)

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
        # What runs between steps, dummy batches of data parallelism too, has no tree.
        if self.tree_attention is not None:
            self.tree_attention.end_step()
        limit = scheduler_output.num_spec_tokens_to_schedule
        return self.step_drafts.make(self.spec_step, sampled_token_ids, sample_hidden_states, limit)
