# SPDX-License-Identifier: Apache-2.0
"""The drafts of one step: what the proposer makes within the budget, cut to what is verifiable."""

import time
from collections.abc import Container, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import torch

from vllm_spec_ext.engine.drafting.draft_budget import UNLIMITED, Allowance, DraftBudget, shares
from vllm_spec_ext.engine.drafting.scheduled_draft import ScheduledDraft
from vllm_spec_ext.engine.drafting.shadow_drafts import MOST_TOKENS, ShadowDrafts
from vllm_spec_ext.engine.drafting.step_tap import record_step, wants_any
from vllm_spec_ext.engine.drafting.unread_tokens import UnreadTokens
from vllm_spec_ext.engine.models.unread_states import behind
from vllm_spec_ext.engine.requests.state import RequestState
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.trees.plan import fitting_prefix, segment_bounds
from vllm_spec_ext.engine.verifying.stop_tokens import length_of_answer
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    Draft,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.draft_tree import chain_parents, is_branching

if TYPE_CHECKING:
    from vllm_spec_ext.engine.spec_runner import SpecRunner


class StepDrafts:
    """Of one runner; works on rank 0 only."""

    def __init__(self, runner: "SpecRunner") -> None:
        """Start with the small budget of a fresh engine, unless the user wants none."""
        self._runner = runner
        settings = runner.speculative_config.spec_ext
        # Models and views read the states of every step; what is learned from is recorded there.
        drafter = runner.drafter
        is_alone = runner.vllm_config.parallel_config.tensor_parallel_size == 1
        models_read = drafter.models and not (drafter.models.can_rest and is_alone)
        every_step = drafter.needs.every_step or models_read or drafter.views or settings.online
        self.budget: DraftBudget | None = None
        # An asynchronous scheduler has every request verify as many tokens, drafted or not.
        self._fixed_length = bool(runner.vllm_config.scheduler_config.async_scheduling)
        if settings.options.adaptive_length and not self._fixed_length:
            self.budget = DraftBudget(can_rest=not every_step)
        self._shadows = ShadowDrafts()
        self._unread = UnreadTokens()
        self._num_held_back = 0  # steps

    def num_likeliest(self, step: Step) -> int:
        """Likeliest next tokens that the proposer or the tap wants of this step's rows.

        0 where none are drafted or recorded: reading them takes time, a hundredth of a small
        model's step.
        """
        drafter = self._runner.drafter
        idle = self.budget is not None and self.budget.is_idle
        wanted = 0 if idle else drafter.needs.next_tokens
        online = drafter.online
        if online is None or online.tap is None:
            return wanted
        recorded = wants_any(online.tap, step.request_ids, step.states)
        return max(wanted, online.num_likeliest if recorded else 0)

    def settle(self, leaving: Sequence[str]) -> None:
        """Requests leave: draft models read what they have not read of their last steps.

        Others may find it in their blocks: a second turn, or the same request when it comes back.
        """
        drafter = self._runner.drafter
        if not drafter.models or not self._unread.has_any(leaving):
            return
        step = self._runner.spec_step  # the last one, which went by
        rows = self._runner.rows_of(step, [[-1]] * len(step.request_ids))
        # As behind that step: its states are among those that were kept.
        drafter.begin_models(list(map(behind, rows)), self._unread.begin_reading(()))
        drafter.end_models(could_draft=False)

    def settle_all_but(self, scheduled: Container[str]) -> None:
        """The same of requests that stay and take no part in the step to come."""
        self.settle([name for name in self._unread.names if name not in scheduled])

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone."""
        gone = list(request_ids)
        self._shadows.forget(gone)
        self._runner.drafter.count_unread(self._unread.forget(gone))

    def make(
        self,
        step: Step,
        new_tokens: list[list[int]],
        sample_hidden_states: torch.Tensor,
        max_draft_tokens: int,
    ) -> list[list[int]]:
        """Draft tokens of each request, in batch order; the drafts wait in the requests' states.

        Rank 0 decides, the others follow; it alone is asked where drafts are looked up late, as
        the others get theirs from its device. Arguments as of :meth:`decide`.
        """
        drafter = self._runner.drafter
        decide = partial(self.decide, step, new_tokens, sample_hidden_states, max_draft_tokens)
        ranks = drafter.ranks
        drafts, probs = ranks.drawing_apart(decide) if drafter.is_late else ranks.lead(decide)
        if not drafts:  # nobody was asked
            return [[] for _ in new_tokens]
        made, rest = iter(drafts), iter(probs)
        result: list[list[int]] = []
        for state, tokens in zip(step.states, new_tokens, strict=True):
            if not tokens:
                result.append([])
                continue
            draft = next(made)
            result.append(draft.tokens)
            state.draft, state.probs = draft, next(rest) if draft.drawn is not None else None
        return result

    def decide(
        self,
        step: Step,
        new_tokens: list[list[int]],
        sample_hidden_states: torch.Tensor,
        max_draft_tokens: int,
    ) -> tuple[list[ScheduledDraft], list[torch.Tensor]]:
        """One draft for each request that got new tokens, in batch order; none while it rests.

        Args:
            step: The one that gave these tokens.
            new_tokens: Of each request; empty in an unfinished prefill.
            sample_hidden_states: [num_sampled_rows, hidden] of the target's final layer.
            max_draft_tokens: The engine's limit for each request.

        Returns:
            The drafts, and the distributions of the drawn ones.
        """
        runner = self._runner
        if self._rests(step, new_tokens):
            return [], []
        unread = self._unread.begin_reading(step.request_ids)
        started = self._observe_step(step, new_tokens)
        rows = [row for row, tokens in enumerate(new_tokens) if tokens]
        names, states = step.request_ids, step.states
        requests = [
            self.request_step(names[row], states[row], new_tokens[row], max_draft_tokens)
            for row in rows
        ]
        self._add_next_tokens(step, rows, requests)
        known = self._follow_shadows(step, requests)
        could_draft = any(request.room > 0 for request in requests)
        allowance = self._within_budget(requests)
        hidden = None
        # Who drafts late has read them by now.
        if runner.drafter.needs.hidden_states and rows and not runner.drafter.is_late:
            last = step.last_rows(new_tokens)
            hidden = sample_hidden_states[[last[row] for row in rows]]
        plain_seconds = None if self.budget is None else self.budget.plain_seconds(len(requests))
        context = StepContext(
            tuple(requests),  # which a proposer cannot take apart
            hidden,
            allowance.min_probability,
            plain_seconds,
            allowance.fixed_cost,
            allowance.max_tokens if runner.drafter.needs.shares_nodes else None,
            allowance.branch_cost,
            fixed_length=self._fixed_length,
            is_shadow=allowance.is_shadow,
        )
        self._log_outcomes(step, rows, new_tokens, requests)
        self._record(step, rows, requests, hidden)
        models, views = runner.drafter.models, runner.drafter.views
        if models or views:
            runner.drafter.begin_models(runner.rows_of(step, new_tokens), unread)
        rooms = [request.room for request in requests]  # whatever the proposer writes there
        made = runner.drafter.draft(context, step.outcomes(new_tokens), known)
        prompt_seconds = 0.0
        if models or views:
            prompt_seconds = runner.drafter.end_models(could_draft)
        if allowance.is_shadow:
            self._shadows.keep(requests, made)
            made = [EMPTY_DRAFT] * len(made)
        elif self._shadows:
            drafted = zip(requests, made, strict=True)
            self._shadows.supersede(one.request_id for one, draft in drafted if len(draft))
        most = allowance.max_tokens
        if most is not None and sum(sizes := list(map(len, made))) > most:
            rooms = list(map(min, rooms, shares(most, sizes)))
        drafts, probs = self._schedule(requests, [states[row] for row in rows], rooms, made)
        if self.budget is not None:
            taken = time.perf_counter() - started - prompt_seconds
            self.budget.drafted({runner.drafter.info.name: taken})
        return drafts, probs

    def _schedule(
        self,
        requests: list[RequestStep],
        states: list[RequestState],
        rooms: list[int],
        made: list[Draft],
    ) -> tuple[list[ScheduledDraft], list[torch.Tensor]]:
        trees, log = self._runner.tree_attention, self._runner.step_log
        num_free = 0 if trees is None else len(trees.scratch)
        drafts, probs = [], []
        for request, state, room, draft in zip(requests, states, rooms, made, strict=True):
            size, tree = min(len(draft.tokens), room), None
            if draft.parents is not None:
                size, tree, used = self._verifiable(request, state, room, draft, num_free)
                num_free -= used
            tokens = draft.tokens[:size].tolist()
            drawn = None
            if draft.probs is not None and tokens and self._may_draw(request, state):
                drawn = draft.drawn
                rows = draft.probs[:size].to(torch.float32)
                # Rows of another dtype do not quite sum to 1, and not every verifier divides.
                probs.append(rows / rows.sum(1, keepdim=True))
            drafts.append(ScheduledDraft(request.request_id, tokens, tree, drawn))
            if log is not None:
                parents = chain_parents(size) if tree is None else tree
                log.drafted(request.request_id, tokens, parents, draft)
        return drafts, probs

    def _rests(self, step: Step, new_tokens: list[list[int]]) -> bool:
        """Leave the tokens of this step unread, if drafts lose time and nothing else happened."""
        now = time.perf_counter()
        if self.budget is None or not self.budget.may_rest() or step.started is None:
            return False
        # Who reads the log looks at every step; the end of a shadow draft is soon told.
        if self._runner.step_log is not None or self._shadows:
            return False
        if any(step.drafts) or not self._unread.can_take(step.request_ids, new_tokens):
            return False
        self._leave_unread(new_tokens)
        self._runner.drafter.count_held_back(sum(state.options.enabled for state in step.states))
        self.budget.rested(len(new_tokens), now - step.started, time.perf_counter() - now)
        return True

    def _leave_unread(self, new_tokens: list[list[int]]) -> None:
        self._unread.take(new_tokens)
        self._runner.drafter.models.rest(len(new_tokens))

    def _observe_step(self, step: Step, new_tokens: list[list[int]]) -> float:
        """By now the new tokens are on the host; returns the time, at which drafting starts."""
        now = time.perf_counter()
        if self.budget is not None:
            # What was accepted behind the end of an answer saves no step.
            emitted = list(filter(None, map(length_of_answer, new_tokens, step.states)))
            drafted = [token for draft in step.drafts for token in draft]
            # Placeholders (-1) take time, and are no drafts that failed.
            num_drafted = sum(token >= 0 for token in drafted)
            is_usual = num_drafted == len(drafted)
            self.budget.verified(
                len(emitted),
                num_drafted,
                sum(emitted),
                now - step.started if step.started is not None and is_usual else None,
                self._num_branches(step),
            )
        return now

    def _num_branches(self, step: Step) -> int:
        """Paths that leave another one, of all drafts that the step verified."""
        return sum(len(segment_bounds(tree)) - 1 for tree in step.parents if tree is not None)

    def _follow_shadows(self, step: Step, requests: Sequence[RequestStep]) -> list[StepOutcome]:
        """Outcomes of drafts that were not verified, as far as they are known now."""
        if not self._shadows:
            return []
        outcomes, result = self._shadows.follow(requests)
        # An answer that is over goes on no more, and its session may wait for long.
        over = (state.over_at is not None for state in step.states)
        self._shadows.forget(compress(step.request_ids, over))
        if result is not None and self.budget is not None:
            self.budget.shadowed(result.num_requests, result.num_drafted, result.num_accepted)
        return outcomes

    def _within_budget(self, requests: list[RequestStep]) -> Allowance:
        """Take away the room that drafts have not earned."""
        if self.budget is None:
            return UNLIMITED
        rooms = [request.room for request in requests]
        allowance = self.budget.allow(rooms, is_following=bool(self._shadows))
        if allowance.is_shadow:
            self._runner.drafter.count_held_back(sum(room > 0 for room in rooms))
            for request in requests:
                request.room = min(request.room, MOST_TOKENS)
            return allowance
        if allowance.max_tokens is None or not requests:
            return allowance
        if allowance.max_tokens and self._runner.drafter.needs.shares_nodes:
            self._runner.drafter.count_held_back(sum(room > 0 for room in rooms))
            return allowance
        self._num_held_back += 1  # the remainder goes to another request each time
        given = shares(allowance.max_tokens, rooms, self._num_held_back % len(requests))
        self._runner.drafter.count_held_back(sum(map(int.__lt__, given, rooms)))
        for request, room in zip(requests, given, strict=True):
            request.room = room
        return allowance

    def _add_next_tokens(
        self, step: Step, rows: Sequence[int], requests: Sequence[RequestStep]
    ) -> None:
        """Add what the target foresees at the rows of the step, where the proposer needs it."""
        if step.likeliest is None or not self._runner.drafter.needs.next_tokens:
            return
        histories = [(-1, -1)] * len(step.request_ids)
        for row, request in zip(rows, requests, strict=True):
            num_new = len(request.new_tokens) - (request.num_steps - 1)  # in this step
            before = request.token_ids[: len(request.token_ids) - num_new][-2:]
            histories[row] = (-1, -1, *before.tolist())[-2:]
        found = step.likeliest.of_requests(histories, step.verified, step.parents)
        for row, request in zip(rows, requests, strict=True):
            request.next_tokens = found[row]

    def request_step(
        self, request_id: str, state: RequestState, new_tokens: list[int], max_draft_tokens: int
    ) -> RequestStep:
        """A request as the proposer sees it.

        Args:
            request_id: Known to the runner, with its new tokens.
            state: Of the request.
            new_tokens: Of the step.
            max_draft_tokens: The engine's limit for each request.
        """
        token_ids, num_prompt_tokens, _ = self._runner.known(request_id)
        num_tokens = len(token_ids)
        # The bonus token needs a place too, so one less than what is left.
        left = self._runner.max_model_len - num_tokens - 1
        if state.max_tokens:
            left = min(left, state.max_tokens - (num_tokens - num_prompt_tokens) - 1)
        room = min(state.most_drafted(max_draft_tokens), left)
        if state.over_at is None and not state.ends.isdisjoint(new_tokens):
            size = length_of_answer(new_tokens, state)
            state.over_at = num_tokens - len(new_tokens) + size
            new_tokens = new_tokens[:size]
        elif state.over_at is not None:
            new_tokens = []
        if state.over_at is not None:
            # What was accepted behind the end of an answer nobody gets, and nobody learns.
            token_ids, room = token_ids[: state.over_at], 0
        unread = self._unread.pop(request_id)
        # By place: named, it takes half as long again.
        return RequestStep(
            request_id,
            token_ids,
            num_prompt_tokens,
            [*unread, *new_tokens],
            max(0, room),
            state.options,
            *state.sampling,
            state.share_group,
            state.ends,
            None,
            len(unread) + 1,
        )

    def _verifiable(
        self, request: RequestStep, state: RequestState, room: int, draft: Draft, num_free: int
    ) -> tuple[int, list[int] | None, int]:
        """The part of a tree that the next step can verify.

        Returns:
            How many nodes stay, their parents if they branch, and the scratch blocks that they
            will need.
        """
        assert draft.parents is not None
        parents: list[int] = draft.parents[:room].tolist()
        if not is_branching(parents):
            return len(parents), None, 0
        trees = self._runner.tree_attention
        # vLLM's grammar follows one chain of draft tokens.
        if trees is None or state.has_grammar:
            return segment_bounds(parents)[0][1], None, 0
        num_computed = len(request.token_ids) - 1
        size, used = fitting_prefix(parents, num_computed, trees.block_size, num_free)
        if size < len(parents):
            parents = parents[:size]
            return size, parents if is_branching(parents) else None, used
        return size, parents, used

    def _may_draw(self, request: RequestStep, state: RequestState) -> bool:
        """Whether the distributions of a draft may be used for this request.

        A seeded request's text must not depend on its drafts (engine/verifying/seeded_rows.py); a
        grammar cuts drafts where a drawn token breaks it, so what is left is no longer a draw; and
        the log-probabilities after sampling constraints are those of vLLM's own draws.
        """
        if request.seed is not None or state.has_grammar:
            return False
        mode = self._runner.vllm_config.model_config.logprobs_mode
        return str(getattr(mode, "value", mode)).startswith("raw")

    def _record(
        self,
        step: Step,
        rows: list[int],
        requests: list[RequestStep],
        hidden: torch.Tensor | None,
    ) -> None:
        online = self._runner.drafter.online
        if online is not None and online.tap is not None and rows:
            tap = online.tap
            self._runner.drafter.guarded(
                "online", lambda: record_step(tap, step, rows, requests, hidden)
            )

    def _log_outcomes(
        self,
        step: Step,
        rows: list[int],
        new_tokens: list[list[int]],
        requests: list[RequestStep],
    ) -> None:
        log = self._runner.step_log
        if log is None:
            return
        log.next_step()
        for row, request in zip(rows, requests, strict=True):
            accepted = step.accepted_nodes(row, len(new_tokens[row]) - 1)
            log.verified(
                request.request_id,
                [token for token in step.verified[row] if token >= 0],
                accepted,
                new_tokens[row],
                request.next_tokens,
            )
