# SPDX-License-Identifier: Apache-2.0
"""The runner mixin: turns vLLM's V1 model runner into one that feeds our proposers.

Every override calls ``super()`` or replaces a step that vLLM reserves for the drafter; none copies
vLLM code. Each has the name of the method of ``GPUModelRunner`` that it replaces (vLLM 0.32).
"""

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from vllm_spec_ext.engine.drafting.draft_budget import UNLIMITED, Allowance, DraftBudget, shares
from vllm_spec_ext.engine.drafting.drafter import Drafter
from vllm_spec_ext.engine.drafting.scheduled_draft import ScheduledDraft
from vllm_spec_ext.engine.requests.state import RequestState, read_request
from vllm_spec_ext.engine.starting.platform_bugs import chain_sampling_is_broken
from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig
from vllm_spec_ext.engine.trees.attention import TreeAttention, unsupported_reason, with_scratch
from vllm_spec_ext.engine.trees.plan import (
    RequestRows,
    TreePlan,
    build_plan,
    fitting_prefix,
    segment_bounds,
)
from vllm_spec_ext.engine.verifying.distribution_sampler import DistributionSampler
from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.engine.verifying.drawn_drafts import DraftDistributions, DrawnDrafts
from vllm_spec_ext.engine.verifying.node_sampling import verify
from vllm_spec_ext.engine.verifying.relaxed_rule import RelaxedRule
from vllm_spec_ext.engine.verifying.thinking_budgets import ThinkingBudgets
from vllm_spec_ext.engine.watching.step_log import StepLog
from vllm_spec_ext.proposers.base import (
    Draft,
    RequestFacts,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.draft_tree import is_branching
from vllm_spec_ext.scorers.parse import is_strict
from vllm_spec_ext.scorers.walk.tree import Walk

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
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger("vllm.spec_ext")

GREEDY_BELOW = 1e-5  # vLLM's own threshold, v1/sample/sampler.py `_SAMPLING_EPS`


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

    _states: dict[str, RequestState]
    _trees: dict[str, tuple[list[int], list[int]]]  # tokens and parents of branching drafts
    _tree_attention: TreeAttention | None
    _drafts_of_step: list[list[int]]  # scheduled draft tokens of each row
    _last_walk: Walk | None

    def init_spec_ext(self) -> None:
        """State of our own; called once, right after the runner was specialised."""
        self._states = {}
        self._trees = {}
        self._drawn = DrawnDrafts()
        self._budgets = ThinkingBudgets()
        self._tree_attention = None
        self._drafts_of_step = []
        self._last_walk = None
        self._held_generators: dict[int, torch.Generator] = {}
        adaptive = self.speculative_config.spec_ext.options.adaptive_length
        self._budget: DraftBudget | None = DraftBudget() if adaptive else None
        self._num_held_back = 0  # steps
        self._step_start: float | None = None
        self.step_log: StepLog | None = None
        self._walk_sampled_chains = chain_sampling_is_broken(self.device)
        settings = self.speculative_config.spec_ext
        self._relaxed_rule: RelaxedRule | None = None
        if settings.rule is not None and not is_strict(settings.rule):
            vocab_size = self.vllm_config.model_config.get_vocab_size()
            self._relaxed_rule = RelaxedRule(settings, vocab_size)
        self._distribution = DistributionSampler(self.sampler.topk_topp_sampler)
        self.sampler.topk_topp_sampler = self._distribution

    # -- KV cache ------------------------------------------------------------------------------

    def initialize_kv_cache(
        self, kv_cache_config: "KVCacheConfig", *args: Any, **kwargs: Any
    ) -> None:
        """Add the scratch blocks of draft trees behind the request blocks."""
        num_scratch = self.drafter.num_scratch_blocks
        is_profiling = bool(args and args[0]) or kwargs.get("is_profiling", False)
        if not num_scratch or is_profiling:
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
            return
        first = kv_cache_config.num_blocks
        enlarged = with_scratch(kv_cache_config, num_scratch)
        super().initialize_kv_cache(enlarged, *args, **kwargs)  # type: ignore[misc]
        reason = unsupported_reason(self)
        if reason is not None:
            logger.warning("vllm-spec-ext: only the first path of each draft is used: %s", reason)
            return
        self._tree_attention = TreeAttention(self, range(first, first + num_scratch))

    # -- before the forward pass ---------------------------------------------------------------

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
            self._drawn.forget(gone)
            self._budgets.forget(gone)
            if self.step_log is not None:
                self.step_log.forget(sorted(gone))
            for request_id in gone:
                self._states.pop(request_id, None)
                self._trees.pop(request_id, None)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _prepare_inputs(
        self, scheduler_output: "SchedulerOutput", num_scheduled_tokens: np.ndarray
    ) -> Any:
        """Where drafts branch, replace vLLM's chain layout by a tree plan."""
        self._step_start = time.perf_counter()
        result = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens
        )
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        self._drafts_of_step = [scheduled.get(req, []) for req in self.input_batch.req_ids]
        decoded = sum(len(draft) + 1 for draft in self._drafts_of_step)
        if decoded != scheduler_output.total_num_scheduled_tokens:
            self._step_start = None  # a step with prefill says nothing about decoding
        if self._tree_attention is not None:
            self._tree_attention.end()
            if self._trees:
                self._plan_trees(num_scheduled_tokens)
        return result

    def _plan_trees(self, num_scheduled_tokens: np.ndarray) -> None:
        assert self._tree_attention is not None
        batch = self.input_batch
        starts = self.query_start_loc.np
        requests = []
        for row, (request_id, draft) in enumerate(
            zip(batch.req_ids, self._drafts_of_step, strict=True)
        ):
            parents = None
            num_tokens = int(num_scheduled_tokens[row])
            if draft and num_tokens == len(draft) + 1:
                parents = self._scheduled_parents(request_id, draft)
            first, computed = int(starts[row]), int(batch.num_computed_tokens_cpu[row])
            requests.append(RequestRows(first, num_tokens, computed, parents))
        if all(request.parents is None for request in requests):
            return
        attention = self._tree_attention
        table = batch.block_table[0].block_table.np
        attention.begin(build_plan(requests, table, attention.block_size, attention.scratch))

    def _scheduled_parents(self, request_id: str, draft: Sequence[int]) -> list[int] | None:
        """Parents of the scheduled part of a request's tree; None if that part is a chain."""
        tokens, parents = self._trees.get(request_id, ([], []))
        if tokens[: len(draft)] != list(draft):
            return None  # not the draft that we stored, so vLLM's own placeholders
        parents = parents[: len(draft)]
        return parents if is_branching(parents) else None

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """A full CUDA graph has a fixed number of requests, so not with virtual ones."""
        if self._tree_attention is None or self._tree_attention.plan is None:
            return super()._determine_batch_execution_and_padding(  # type: ignore[misc]
                *args, **kwargs
            )
        with _no_full_graph(self.cudagraph_dispatcher):
            return super()._determine_batch_execution_and_padding(  # type: ignore[misc]
                *args, **kwargs
            )

    # -- verification --------------------------------------------------------------------------

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: "SpecDecodeMetadata | None"
    ) -> "SamplerOutput":
        """Trees are judged by the target's own samples, chains by vLLM's sampler.

        Drafts that were drawn from distributions which the proposer gave are judged with these.

        A step without any draft is sampled plainly: vLLM sends it through its rejection sampler
        too, which fails on an empty batch of draft rows when a request asks for top-k on CPU
        (``apply_top_k_only``). A thinking budget makes us verify every step: vLLM loses count of it
        where drafts are rejected and where there are none.
        """
        self._last_walk = None
        self._hold_back_generators()
        metadata = self.input_batch.sampling_metadata
        states = [self._state_of(request_id) for request_id in self.input_batch.req_ids]
        greedy = self._greedy_requests()
        has_eta = any(state.eta is not None for state in states)
        self._distribution.use_eta([s.eta for s in states], [1] * len(states), greedy, self.device)
        holder = metadata.thinking_budget_state_holder
        has_budget = holder is not None and holder.has_tracked_requests()
        has_draft = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len > 0
        if not has_draft and not has_budget:
            return super()._sample(logits, None)  # type: ignore[misc]
        plan = self._tree_attention.plan if self._tree_attention is not None else None
        # Seeded requests draw the noise of plain decoding, which only a walk can give them.
        broken = self._walk_sampled_chains and not metadata.all_greedy
        must_walk = broken or has_eta or has_budget or bool(metadata.generators)
        if plan is None and self._relaxed_rule is None and not must_walk:
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        batch = self._draft_batch(plan)
        num_rows = (np.diff(batch.node_starts) + 1).tolist()
        self._distribution.use_eta([s.eta for s in states], num_rows, greedy, self.device)
        judge = None
        distributions = self._draft_distributions(greedy)
        if has_budget:
            requests = [self.requests[request_id] for request_id in self.input_batch.req_ids]
            budgets = self._budgets.of_rows(holder, batch, requests, metadata.output_token_ids)
            metadata = replace(metadata, thinking_budget_state_holder=budgets)
        if self._relaxed_rule is not None and has_draft:
            judge, distributions = self._relaxed_rule.judge(batch, states, greedy, self.device), {}
        assert logits is not None
        output, self._last_walk = verify(
            batch, logits, metadata, self.sampler, judge, distributions
        )
        if plan is not None:
            self._commit(self._last_walk)
        return output

    def _hold_back_generators(self) -> None:
        """Let requests in mid-prefill, whose samples are discarded, draw nothing from their seeds.

        vLLM takes such a draw back by the generator's offset (0.32 ``_bookkeeping_sync``), which a
        CPU generator does not have: there it ends the engine.
        """
        generators = self.input_batch.generators
        discarded = self.discard_request_mask.np
        held = [row for row in generators if discarded[row]] if generators else []
        self._held_generators = {row: generators.pop(row) for row in held}

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Give the generators that were held back to their requests again."""
        result = super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
        self.input_batch.generators.update(self._held_generators)
        return result

    def _may_draw(self, request_id: str) -> bool:
        """Whether the distributions of a draft may be used for this request.

        A seeded request's text must not depend on its drafts (:mod:`.seeded_rows`); a grammar cuts
        drafts where a drawn token breaks it, so what is left is no longer a draw; and the
        log-probabilities after sampling constraints are those of vLLM's own draws.
        """
        params = self.requests[request_id].sampling_params
        if params.seed is not None or params.structured_outputs is not None:
            return False
        return self.sampler.logprobs_mode.startswith("raw")

    def _draft_distributions(self, greedy: Sequence[bool]) -> dict[int, DraftDistributions]:
        """Batch index -> distributions of the sampled requests whose drafts were drawn."""
        if not len(self._drawn):
            return {}
        found = {
            row: self._drawn.of(request_id, self._drafts_of_step[row])
            for row, request_id in enumerate(self.input_batch.req_ids)
            if not greedy[row]
        }
        return {
            row: distributions for row, distributions in found.items() if distributions is not None
        }

    def _get_spec_decode_draft_probs(
        self, spec_decode_metadata: "SpecDecodeMetadata"
    ) -> torch.Tensor | None:
        """Distributions of all draft rows for vLLM's rejection sampler; one-hot where none is."""
        distributions = self._draft_distributions(self._greedy_requests())
        if not distributions:
            return None
        rows = []
        for row, draft in enumerate(self._drafts_of_step):
            if row in distributions:
                rows.append(distributions[row].probs.to(self.device, torch.float32))
            elif draft:
                tokens = torch.tensor(draft, device=self.device)
                vocab_size = self.vllm_config.model_config.get_vocab_size()
                one_hot = torch.nn.functional.one_hot(tokens.clamp(min=0), vocab_size).float()
                # A placeholder is rejected; what comes in its place is the target's own draw.
                rows.append(one_hot.masked_fill_((tokens < 0)[:, None], 0.0))
        return torch.cat(rows).contiguous()

    def _draft_batch(self, plan: TreePlan | None) -> DraftBatch:
        """The drafts of this step, without what the plan had to drop."""
        drafts = list(self._drafts_of_step)
        parents: list[Sequence[int] | None] = [None] * len(drafts)
        for row in plan.segments if plan is not None else ():
            assert plan is not None
            parents[row] = self._scheduled_parents(self.input_batch.req_ids[row], drafts[row])
            kept = plan.kept(row, len(drafts[row]))
            drafts[row] = drafts[row][:kept] + [-1] * (len(drafts[row]) - kept)
        return DraftBatch.of(drafts, parents)

    def _greedy_requests(self) -> list[bool]:
        batch = self.input_batch
        if batch.sampling_metadata.all_greedy:
            return [True] * len(batch.req_ids)
        return (batch.temperature_cpu[: len(batch.req_ids)] < GREEDY_BELOW).tolist()

    def _commit(self, walk: Walk) -> None:
        """Put the accepted tokens' KV in its place before anything counts as computed."""
        attention = self._tree_attention
        assert attention is not None
        assert attention.plan is not None
        copies = []
        batch = self.input_batch
        for row in attention.plan.segments:
            num_accepted = int(walk.num_accepted[row])
            if not num_accepted:
                continue
            last_node = int(walk.accepted[row, num_accepted - 1])
            position = int(batch.num_computed_tokens_cpu[row]) + num_accepted
            table = batch.block_table[0].block_table.np[row]
            copies += [
                (block, int(table[column]))
                for block, column in attention.plan.commits(
                    row, last_node, position, attention.block_size
                )
            ]
        attention.copy_blocks(copies)

    # -- drafting ------------------------------------------------------------------------------

    def _input_fits_in_drafter(
        self, common_attn_metadata: "CommonAttentionMetadata | None"
    ) -> bool:
        """vLLM drops the drafts of *all* requests when one nears ``max_model_len``.

        Ours are limited request by request instead, see :meth:`_request_step`.
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
            sample_hidden_states: [num_sampled_rows, hidden] of the target's final layer.
        """
        rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        drafts, probs = self.drafter.ranks.lead(
            lambda: self._decide_drafts(
                rows,
                sampled_token_ids,
                sample_hidden_states,
                scheduler_output.num_spec_tokens_to_schedule,
            )
        )
        result: list[list[int]] = [[] for _ in sampled_token_ids]
        rest = iter(probs)
        for row, draft in zip(rows, drafts, strict=True):
            result[row] = draft.tokens
            self._trees.pop(draft.request_id, None)
            if draft.parents is not None:
                self._trees[draft.request_id] = (draft.tokens, draft.parents)
            distributions = (
                None if draft.drawn is None else DraftDistributions(next(rest), draft.drawn)
            )
            self._drawn.keep(draft.request_id, draft.tokens, distributions)
        return result

    def _decide_drafts(
        self,
        rows: list[int],
        sampled_token_ids: list[list[int]],
        sample_hidden_states: torch.Tensor,
        budget: int,
    ) -> tuple[list[ScheduledDraft], list[torch.Tensor]]:
        """On rank 0: one draft for each of these rows, and the distributions of the drawn ones."""
        drafting_start = self._observe_cost(sampled_token_ids)
        steps = [self._request_step(row, sampled_token_ids[row], budget) for row in rows]
        steps, allowance = self._within_budget(steps)
        hidden = None
        if self.drafter.needs.hidden_states and rows:
            last = self._last_rows(sampled_token_ids)
            hidden = sample_hidden_states[[last[row] for row in rows]]
        outcomes = self._outcomes(sampled_token_ids)
        context = StepContext(steps, hidden, allowance.min_probability)
        self._log_outcomes(rows, sampled_token_ids)
        num_free = len(self._tree_attention.scratch) if self._tree_attention is not None else 0
        drafts, probs = [], []
        for step, draft in zip(steps, self.drafter.draft(context, outcomes), strict=True):
            parents, used = self._verifiable(step, draft, num_free)
            num_free -= used
            tokens = draft.tokens[: len(parents)].tolist()
            drawn = None
            if draft.probs is not None and tokens and self._may_draw(step.request_id):
                drawn = draft.drawn
                probs.append(draft.probs[: len(tokens)])
            tree = parents if is_branching(parents) else None
            drafts.append(ScheduledDraft(step.request_id, tokens, tree, drawn))
            if self.step_log is not None:
                self.step_log.drafted(step.request_id, tokens, parents, draft)
        if self._budget is not None:
            self._budget.drafted({self.drafter.info.name: time.perf_counter() - drafting_start})
        return drafts, probs

    def _observe_cost(self, sampled_token_ids: list[list[int]]) -> float:
        """By now the new tokens are on the host; returns the time, at which drafting starts."""
        now = time.perf_counter()
        if self._budget is not None:
            emitted = [
                (len(draft), len(tokens))
                for draft, tokens in zip(self._drafts_of_step, sampled_token_ids, strict=True)
                if tokens
            ]
            self._budget.verified(
                len(emitted),
                sum(num_drafted for num_drafted, _ in emitted),
                sum(num_tokens for _, num_tokens in emitted),
                None if self._step_start is None else now - self._step_start,
            )
        return now

    def _within_budget(self, steps: list[RequestStep]) -> tuple[list[RequestStep], Allowance]:
        """Take away the room that drafts have not earned."""
        if self._budget is None:
            return steps, UNLIMITED
        rooms = [step.room for step in steps]
        allowance = self._budget.allow(rooms)
        if allowance.max_tokens is None or not steps:
            return steps, allowance
        self._num_held_back += 1  # the remainder goes to another request each time
        given = shares(allowance.max_tokens, rooms, self._num_held_back % len(steps))
        self.drafter.count_held_back(sum(map(int.__lt__, given, rooms)))
        held = [replace(step, room=room) for step, room in zip(steps, given, strict=True)]
        return held, allowance

    def _verifiable(self, step: RequestStep, draft: Draft, num_free: int) -> tuple[list[int], int]:
        """The part of a draft that the next step can verify.

        Returns:
            Parents of the nodes that stay, and the scratch blocks that they will need.
        """
        num_nodes = min(len(draft), step.room)
        if draft.parents is None:
            return list(range(-1, num_nodes - 1)), 0
        parents: list[int] = draft.parents[:num_nodes].tolist()
        if not is_branching(parents):
            return parents, 0
        params = self.requests[step.request_id].sampling_params
        # vLLM's grammar follows one chain of draft tokens.
        if self._tree_attention is None or params.structured_outputs is not None:
            first_end = segment_bounds(parents)[0][1]
            return parents[:first_end], 0
        size, used = fitting_prefix(
            parents, len(step.token_ids) - 1, self._tree_attention.block_size, num_free
        )
        return parents[:size], used

    def _request_step(self, row: int, new_tokens: list[int], budget: int) -> RequestStep:
        batch = self.input_batch
        request_id = batch.req_ids[row]
        num_tokens = int(batch.num_tokens_no_spec[row])
        num_prompt_tokens = int(batch.num_prompt_tokens[row])
        params = self.requests[request_id].sampling_params
        state = self._state_of(request_id)
        options = state.options
        if options.max_draft_tokens is not None:
            budget = min(budget, options.max_draft_tokens)
        num_left = (params.max_tokens or self.max_model_len) - (num_tokens - num_prompt_tokens)
        return RequestStep(
            request_id=request_id,
            token_ids=batch.token_ids_cpu[row, :num_tokens],
            num_prompt_tokens=num_prompt_tokens,
            new_tokens=new_tokens,
            # The bonus token needs a place too, so one less than what is left.
            room=max(0, min(budget, num_left - 1, self.max_model_len - num_tokens - 1)),
            options=options,
            temperature=params.temperature,
            seed=params.seed,
            share_group=state.share_group,
        )

    def _state_of(self, request_id: str) -> RequestState:
        state = self._states.get(request_id)
        if state is None:
            params = self.requests[request_id].sampling_params
            batch = self.input_batch
            row = batch.req_id_to_index[request_id]
            facts = RequestFacts(
                prompt=batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]],
                vocab_size=batch.vocab_size,
                max_model_len=self.max_model_len,
            )
            state = read_request(params, self.speculative_config.spec_ext, facts)
            self._states[request_id] = state
        return state

    def _last_rows(self, sampled_token_ids: list[list[int]]) -> list[int]:
        """Row of the step's logits that produced each request's last new token."""
        rows, offset = [], 0
        for row, (draft, tokens) in enumerate(
            zip(self._drafts_of_step, sampled_token_ids, strict=True)
        ):
            node = len(tokens) - 2  # the node before the last token of a chain, -1 = root
            if self._last_walk is not None and node >= 0:
                node = int(self._last_walk.accepted[row, node])
            rows.append(offset + 1 + max(node, -1))
            offset += len(draft) + 1
        return rows

    def _outcomes(self, sampled_token_ids: list[list[int]]) -> list[StepOutcome]:
        outcomes = []
        for row, (draft, tokens) in enumerate(
            zip(self._drafts_of_step, sampled_token_ids, strict=True)
        ):
            # Placeholders (-1) are the scheduler's padding of a resumed request, not a draft.
            num_drafted = sum(token >= 0 for token in draft)
            if num_drafted and tokens:
                request_id, count = self.input_batch.req_ids[row], len(tokens) - 1
                nodes = self._accepted_nodes(row, count)
                outcomes.append(StepOutcome(request_id, num_drafted, count, nodes))
        return outcomes

    def _accepted_nodes(self, row: int, num_accepted: int) -> tuple[int, ...]:
        """The accepted path of a row's draft; the first nodes of a chain."""
        if self._last_walk is None:
            return tuple(range(num_accepted))
        return tuple(self._last_walk.accepted[row, :num_accepted].tolist())

    def _log_outcomes(self, rows: Sequence[int], sampled_token_ids: list[list[int]]) -> None:
        if self.step_log is None:
            return
        self.step_log.next_step()
        for row in rows:
            tokens = sampled_token_ids[row]
            accepted = self._accepted_nodes(row, len(tokens) - 1)
            self.step_log.judged(
                self.input_batch.req_ids[row], self._drafts_of_step[row], accepted, tokens
            )


@contextmanager
def _no_full_graph(dispatcher: "CudagraphDispatcher") -> Iterator[None]:
    """Keep vLLM's CUDA graph dispatcher from choosing a full graph."""
    from vllm.config import CUDAGraphMode

    dispatch = dispatcher.dispatch

    @functools.wraps(dispatch)
    def without_full(*args: Any, invalid_modes: Any = None, **kwargs: Any) -> Any:
        refused = {CUDAGraphMode.FULL, *(invalid_modes or ())}
        return dispatch(*args, invalid_modes=refused, **kwargs)

    dispatcher.dispatch = without_full
    try:
        yield
    finally:
        del dispatcher.dispatch


def specialise(runner: "GPUModelRunner") -> None:
    """Give a freshly built V1 model runner our overrides.

    vLLM's CPU worker builds its runner in ``init_device`` and offers no factory to override
    (vLLM 0.32 ``CPUWorker.init_device``), so the class is exchanged after construction.
    """
    base = type(runner)
    runner.__class__ = type(f"Spec{base.__name__}", (SpecRunnerMixin, base), {})
    cast(SpecRunnerMixin, runner).init_spec_ext()
