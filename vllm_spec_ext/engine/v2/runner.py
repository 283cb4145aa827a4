# SPDX-License-Identifier: Apache-2.0
"""The mixin of vLLM's V2 model runner: feeds our proposers, and verifies what they draft.

Every override calls ``super()`` and has the name of the method of ``GPUModelRunner`` that it
extends (vLLM 0.32 ``v1/worker/gpu/model_runner.py``). The V1 runner has its own,
:mod:`..runner`; what both do is elsewhere and shared.
"""

import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch

from vllm_spec_ext.engine.drafting.drafter import Drafter
from vllm_spec_ext.engine.drafting.step_drafts import StepDrafts
from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.engine.models.target_states import default_layers
from vllm_spec_ext.engine.placeholders import without_placeholders
from vllm_spec_ext.engine.requests import state as request_state
from vllm_spec_ext.engine.requests.leaving import leaving_requests, let_go
from vllm_spec_ext.engine.requests.state import KnownRequest, RequestStates
from vllm_spec_ext.engine.starting.kv_setup import add_scratch, use_scratch
from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.trees.attention import TreeAttention
from vllm_spec_ext.engine.v2.batch_rows import batch_rows, computed_tokens
from vllm_spec_ext.engine.v2.full_graphs import no_trees_reason, take_any_length
from vllm_spec_ext.engine.v2.known_requests import KnownRequests
from vllm_spec_ext.engine.v2.kv_parts import kv_parts
from vllm_spec_ext.engine.v2.late_tables.late_steps import LateSteps
from vllm_spec_ext.engine.v2.late_tables.speculator import LateSpeculator
from vllm_spec_ext.engine.v2.model_state import add_trees
from vllm_spec_ext.engine.v2.prompt_logprobs import leave_out_short_prompts
from vllm_spec_ext.engine.v2.rejection import WalkSampler
from vllm_spec_ext.engine.v2.speculator import HostDraftTokens, HostSpeculator
from vllm_spec_ext.engine.v2.target_sampler import SpecSamplerMixin, watch_sampler
from vllm_spec_ext.engine.verifying.stop_tokens import end_at_stop_tokens
from vllm_spec_ext.engine.watching.stat_channel import put_news
from vllm_spec_ext.engine.watching.step_log import StepLog

if TYPE_CHECKING:
    from vllm.config.compilation import CompilationConfig
    from vllm.config.vllm import VllmConfig
    from vllm.model_executor.models.interfaces import SupportsEagle3
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
    from vllm.v1.worker.gpu.model_runner import (
        BatchReqState,
        ExecuteModelState,
        GPUModelRunner,
    )
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.utils import AttentionGroup


class SpecRunnerV2Mixin:
    """Mixed in front of the V2 runner by :func:`specialise`."""

    # Attributes of vLLM's runner that the overrides read; listed in compat/reads.py.
    device: torch.device
    max_model_len: int
    speculative_config: SpecExtConfig
    vllm_config: "VllmConfig"
    model: torch.nn.Module
    model_state: "DefaultModelState"
    sampler: SpecSamplerMixin
    rejection_sampler: "RejectionSampler"
    req_states: "RequestState"
    execute_model_state: "ExecuteModelState | None"
    prompt_logprobs_worker: "PromptLogprobsWorker | None"
    compilation_config: "CompilationConfig"
    kv_cache_config: "KVCacheConfig"
    kernel_block_sizes: list[int]
    use_aux_hidden_state_outputs: bool
    block_tables: "BlockTables"
    attn_groups: "list[list[AttentionGroup]]"
    cudagraph_manager: "ModelCudaGraphManager"

    draft_tokens_handler: Any  # vLLM's or ours
    is_async: bool
    spec_step: Step

    def init_spec_ext(self) -> None:
        """State of our own; called once, right after the runner was specialised."""
        self.drafter = Drafter(self.vllm_config)
        self.speculator = HostSpeculator(self.req_states.draft_tokens)
        self._vllm_draft_tokens = self.draft_tokens_handler
        self.is_warming_up = False
        self.is_async = bool(self.vllm_config.scheduler_config.async_scheduling)
        self._host_draft_tokens = HostDraftTokens(self.req_states.draft_tokens, self.is_async)
        self.draft_tokens_handler = self._host_draft_tokens
        self.late_steps: LateSteps | None = None  # if drafts are looked up on the device
        self.spec_requests = KnownRequests()
        self.spec_step = Step()
        self.spec_states = RequestStates(self.speculative_config.spec_ext)
        self.tree_attention: TreeAttention | None = None
        self.step_drafts = StepDrafts(self)
        self.step_log: StepLog | None = None
        self._step_started = 0.0
        self._computed: list[int] = []  # tokens of each request before the step
        # vLLM asks its target for hidden states of its layers if this is set.
        if self.drafter.models.reads_layers:
            self.use_aux_hidden_state_outputs = True

    def state_of(self, request_id: str) -> request_state.RequestState:
        """What we keep of a request."""
        return self.spec_states.of(request_id, self)

    def known(self, request_id: str) -> KnownRequest:
        """A request of the batch; after the bookkeeping with the step's new tokens."""
        return self.spec_requests.get(request_id)

    def rows_of(self, step: Step, new_tokens: list[list[int]]) -> list[BatchRow]:
        """The requests of a batch after its step, for draft models and views."""
        group = self.drafter.models.group
        return batch_rows(self.spec_requests, step, self._computed, new_tokens, group)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """The target's weights, then the proposer; its sampler verifies by our walk."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.drafter.models.reads_layers:
            layers = self.drafter.models.state_layers(default_layers(self.model))
            cast("SupportsEagle3", self.model).set_aux_hidden_state_layers(layers)
        watch_sampler(self.sampler, self)
        self.rejection_sampler = WalkSampler(self)
        self.drafter.load_model(self.model)
        if self.drafter.drafts_trees:
            add_trees(self.model_state, self)

    def start_late_drafts(self) -> None:
        """Look drafts up on the device, where that is possible; the model is loaded.

        Apart from that: vLLM discards what is made while it loads, if an engine sleeps deeply.
        """
        if self.is_async and self.drafter.waits_because is None:
            self.drafter.start_late()
            # vLLM does with these drafts as with its own.
            self.late_steps = LateSteps(self)
            self.speculator = LateSpeculator(self.req_states.draft_tokens, self.late_steps)
            self.draft_tokens_handler = self._vllm_draft_tokens

    def initialize_kv_cache(
        self, kv_cache_config: "KVCacheConfig", *args: Any, **kwargs: Any
    ) -> None:
        """Add the scratch blocks of draft trees and models behind the request blocks."""
        initialize = super().initialize_kv_cache  # type: ignore[misc]
        scratch = add_scratch(self, initialize, kv_cache_config, *args, **kwargs)
        take_any_length(self)
        if scratch:
            reason = no_trees_reason(self.compilation_config.cudagraph_mode)
            self.tree_attention = use_scratch(self, kv_parts(self), scratch, reason)

    def finish_requests(self, scheduler_output: "SchedulerOutput") -> None:
        """Requests come and go; free the proposer's state of those that went."""
        gone = leaving_requests(cast(Any, self), scheduler_output, self.spec_requests)
        if gone:
            if self.late_steps is not None:
                self.late_steps.read_if_told()
            let_go(cast(Any, self), gone)
            self.spec_requests.forget(gone)
        self.drafter.blocks_change(scheduler_output, gone)
        super().finish_requests(scheduler_output)  # type: ignore[misc]
        self.spec_requests.schedule(scheduler_output)

    def add_requests(self, scheduler_output: "SchedulerOutput") -> None:
        """Requests come."""
        super().add_requests(scheduler_output)  # type: ignore[misc]
        leave_out_short_prompts(self, scheduler_output)

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """A step begins; an answer of its own carries what was counted (V1 runner, the same)."""
        self._step_started = time.perf_counter()
        if self.step_drafts.budget is not None:
            scheduler_output = without_placeholders(scheduler_output)
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        return put_news(output, self.drafter.counts)

    def gather_batch_req_state(
        self, scheduler_output: "SchedulerOutput", dummy_run: bool
    ) -> "tuple[BatchReqState | None, int | None]":
        """Which drafts the step verifies; a full CUDA graph is not for one with trees.

        Such a graph has a fixed number of requests, and is chosen after this.
        """
        gather = super().gather_batch_req_state  # type: ignore[misc]
        gathered: tuple[BatchReqState | None, int | None] = gather(scheduler_output, dummy_run)
        state, uniform_tokens = gathered
        self.spec_step = Step()
        if self.tree_attention is not None:
            self.tree_attention.end_step()
        if state is None:
            return state, uniform_tokens
        self.spec_step = Step.of(state.req_ids, scheduler_output, self._step_started, self.state_of)
        if self.is_async and self.late_steps is None:
            self.spec_step.find_drafts()
        if self.late_steps is None:
            self._computed = computed_tokens(self.spec_requests, self.req_states, state)
        if self.tree_attention is not None:
            self._lay_out_trees(self.tree_attention)
            if self.has_trees():
                uniform_tokens = None
        return state, uniform_tokens

    def _lay_out_trees(self, trees: TreeAttention) -> None:
        step = self.spec_step
        if not any(step.parents):
            return
        starts = [0, *accumulate(step.num_scheduled)][:-1]
        blocks = [self.spec_requests.blocks(name) for name in step.request_ids]
        trees.plan_step(step, starts, self._computed, blocks)

    def has_trees(self) -> bool:
        """Whether the step that is being prepared verifies branches."""
        return self.tree_attention is not None and self.tree_attention.plan is not None

    def commit_trees(self) -> None:
        """Put the accepted branches' KV in its place."""
        trees, walk = self.tree_attention, self.spec_step.walk
        if trees is not None and trees.plan is not None and walk is not None:
            trees.commit(walk)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Verify, then draft; the scheduler gets the tokens at once.

        With asynchronous scheduling the scheduler runs ahead all the same: it has prepared the
        next step by now. What waits is this worker, for the step's tokens; with late drafts
        (:mod:`.late_tables`), which vLLM has asked for by now, nothing does.
        """
        sampling = super().sample_tokens  # type: ignore[misc]
        state = self.execute_model_state
        output: AsyncOutput | None = sampling(*args, **kwargs)
        if state is None or output is None:
            return None
        scheduled = state.num_spec_tokens_to_schedule
        if self.late_steps is not None:
            if self.is_warming_up:
                return output
            return self.late_steps.queue(output, state.input_batch, scheduled)
        result = output.get_output()
        batch, new_tokens = state.input_batch, result.sampled_token_ids
        if not self.is_async and not self.is_warming_up:
            end_at_stop_tokens(new_tokens, self.spec_step.states)
        self.spec_requests.append(batch.req_ids, new_tokens)
        drafts: list[list[int]] = [[] for _ in new_tokens]
        if not self.is_warming_up:
            hidden = state.hidden_states
            self.drafter.models.see(hidden, state.aux_hidden_states)
            if self.tree_attention is not None:
                self.tree_attention.end_step()
            if self.drafter.needs.hidden_states:
                hidden = hidden[batch.logits_indices]
            drafts = self.step_drafts.make(self.spec_step, new_tokens, hidden, scheduled)
        self._host_draft_tokens.hand_over(batch, drafts, new_tokens, scheduled)
        return put_news(result, self.drafter.counts)


def specialise(runner: "GPUModelRunner | SpecRunnerV2Mixin") -> None:
    """Give a freshly built V2 model runner our overrides.

    vLLM's CPU worker builds its runner in ``init_device`` and offers no factory to override
    (vLLM 0.32 ``CPUWorker.init_device``), so the class is exchanged after construction.
    """
    base = type(runner)
    runner.__class__ = type(f"Spec{base.__name__}", (SpecRunnerV2Mixin, base), {})
    cast(SpecRunnerV2Mixin, runner).init_spec_ext()
