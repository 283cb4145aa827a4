# SPDX-License-Identifier: Apache-2.0
"""Cascades: levels that draft for each other, and the target verifies what the last one wrote.

Cascade Speculative Drafting (Chen et al. 2023): a *vertical* cascade has a model review, in one
pass, what a cheaper level wrote, so that no model drafts token by token; a *horizontal* one has the
best level write the first tokens, which matter most, and cheaper ones the rest. Beyond the paper:
any method that needs no model as a level, requests with a temperature (each level reviews by
speculative sampling and reports what it really drew from), batches, and rounds only where they pay.

The last level may be the target itself over a part of its KV cache, which reviews what a small
model or a method wrote: TriForce (Sun et al. 2024).

A level that reviews is a model (:mod:`.reviewer`) or a view (:mod:`.view_reviewer`); methods see
verified tokens alone (:mod:`.sources`); :mod:`.writing` is the recursion, :mod:`.judging` the rules
of acceptance, :mod:`.round` the passes of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from vllm_spec_ext.options import MethodOptions, RequestOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    ModelSpec,
    Needs,
    RequestFacts,
    RequestLimits,
    RequestStep,
    StepContext,
    StepOutcome,
    TargetFacts,
    ViewSpec,
    proposer,
)
from vllm_spec_ext.proposers.cascade.options import (
    CascadeOptions,
    Level,
    MethodLevel,
    ModelLevel,
    ReviewingLevel,
    ViewLevel,
)
from vllm_spec_ext.proposers.cascade.reviewer import HostedReviewer, Reviewer
from vllm_spec_ext.proposers.cascade.round_payoff import Kind, RoundPayoff
from vllm_spec_ext.proposers.cascade.view_reviewer import ViewReviewer
from vllm_spec_ext.proposers.growth.model_names import named
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.options import InputCopyRequest
from vllm_spec_ext.proposers.payoff.forward_payoff import TokenCosts, TokenSeconds
from vllm_spec_ext.proposers.view_options import OFF_ON_CPUS

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.proposers.cascade.judging import Chance
    from vllm_spec_ext.proposers.cascade.round import Task
    from vllm_spec_ext.proposers.cascade.sources import Method, Source
    from vllm_spec_ext.proposers.cascade.writing import Rung, Text

_NOISE = -1  # where draft models have their number: their draws are others


@dataclass(frozen=True)
class _Waiting:
    """A draft that waits for its outcome."""

    kind: Kind
    tokens: list[int]


@proposer(
    "cascade",
    summary="Levels that draft for each other: models review what copies or n-grams foresee.",
    options=CascadeOptions,
    request_options=InputCopyRequest,
    num_speculative_tokens=12,
    needs_checkpoint=True,
    best_for="text that repeats in part, where a model several times faster than the target exists",
    cost="a pass of a draft model for each review, over a handful of rows",
    off_on_cpus=OFF_ON_CPUS.format(what="a cascade with a view as a level drafts"),
)
class Cascade(BaseProposer):
    """See the module docstring."""

    def __init__(self, options: MethodOptions) -> None:
        """Keep the options; the models come with :meth:`start`."""
        super().__init__(options)
        self._options = cast(CascadeOptions, options)
        levels = self._options.levels
        methods = [level for level in levels if isinstance(level, MethodLevel)]
        proposers = [level.proposer()(level.parsed) for level in methods]
        self.needs = Needs(
            hidden_states=any(one.needs.hidden_states for one in proposers),
            next_tokens=max((one.needs.next_tokens for one in proposers), default=0),
            distributions=self._options.draw,
            every_step=any(one.needs.every_step for one in proposers),
        )
        self._proposers = proposers
        self._num_methods = len(methods)
        self._methods: list[Method] = []
        self._reviewers: dict[int, Reviewer] = {}
        self._view: ViewReviewer | None = None
        self._is_off = False
        self._rungs: list[Rung] = []
        self._waiting: dict[str, _Waiting] = {}
        self._read: dict[str, int] = {}  # tokens of a request at its last round
        self._value = TokenSeconds()

    @classmethod
    def check(cls, options: MethodOptions, target: TargetFacts) -> None:
        """What the methods of the levels check; raises SpecExtError."""
        for level in cast(CascadeOptions, options).levels:
            if isinstance(level, MethodLevel):
                level.proposer().check(level.parsed, replace(target, is_level=True))

    @classmethod
    def models(cls, options: MethodOptions) -> Sequence[ModelSpec]:
        """The models, the lowest level first."""
        levels = cast(CascadeOptions, options).levels
        return named(
            [
                ModelSpec("", level.model, None, level.quantization, level.stream())
                for level in levels
                if isinstance(level, ModelLevel)
            ]
        )

    @classmethod
    def views(cls, options: MethodOptions) -> Sequence[ViewSpec]:
        """The last level's, if it is one."""
        asked = cast(CascadeOptions, options)
        return [
            level.spec(level.view, on_cpus=asked.draft_on_cpu)
            for level in asked.levels
            if isinstance(level, ViewLevel)
        ]

    @staticmethod
    def check_request(options: RequestOptions, limits: RequestLimits) -> None:
        """As of ``input_copy``, which may be a level; raises RequestOptionError."""
        InputCopy.check_request(options, limits)

    @staticmethod
    def resolve_request(options: RequestOptions, facts: RequestFacts) -> InputCopyRequest:
        """As of ``input_copy``, which may be a level; raises RequestOptionError."""
        return InputCopy.resolve_request(options, facts)

    def start(self, engine: EngineHandle) -> None:
        """Take the models that the engine has loaded, and start the methods.

        Raises:
            SpecExtError: There is no engine that runs models, as in a replay of recorded texts.
        """
        views = self.loaded_views(engine)
        if views is None:
            self._is_off = True
            return
        reviewers: list[Reviewer] = [HostedReviewer(one) for one in self.loaded_models(engine)]
        if views:
            self._view = ViewReviewer(views[0])
            reviewers.append(self._view)
        self.start_with(engine, reviewers)

    def start_with(self, engine: EngineHandle, reviewers: Sequence[Reviewer]) -> None:
        """Start with these levels above the methods, whatever they are.

        Args:
            engine: Its models and views are not used.
            reviewers: The lowest level first.
        """
        from vllm_spec_ext.proposers.cascade.sources import Method
        from vllm_spec_ext.proposers.cascade.writing import Rung

        options = self._options
        for one in self._proposers:
            one.start(replace(engine, models=(), block_drafters=(), views=(), is_level=True))
        self._methods = [Method(one, engine.vocab_size) for one in self._proposers]
        self._reviewers = dict(enumerate(reviewers, self._num_methods))
        self._lenience = {level: options.lenience_of(level) for level in self._reviewers}
        self._rungs = [
            Rung(level in self._reviewers, options.reviews(level), _writes_alone(given))
            for level, given in enumerate(options.levels)
        ]
        self._numbers = options.tokens or [engine.num_speculative_tokens]
        self._names = [*(one.name for one in self._methods), *(one.name for one in reviewers)]
        self._max_depth = engine.num_speculative_tokens
        chunks = {level: sum(self._rungs[level].reviews) for level in self._reviewers}
        self._payoff = RoundPayoff(self._reviewers, chunks, self._max_depth)

    def propose(self, step: StepContext) -> list[Draft]:
        """One chain a request; no pass of any model where none pays."""
        import torch

        drafts = [EMPTY_DRAFT] * len(step.requests)
        if self._is_off:
            return drafts
        costs = self._observe_step(step)
        # The methods see all new tokens, whatever is drafted.
        found = [method.ask(step) for method in self._methods]
        kinds: dict[int, Kind] = {}
        for row, request in enumerate(step.requests):
            if request.room > 0 and request.options.enabled and self._is_long(request):
                is_guessed = any(sources[row].tokens for sources in found)
                kinds[row] = Kind(is_guessed, self._draws(request))
                self._waiting.pop(request.request_id, None)  # a draft that had no outcome
        plan = self._payoff.plan(kinds, self._unread(step, kinds), costs)
        if not plan.rows:
            return drafts
        with torch.inference_mode():
            tasks = self._round(step, plan.rows, plan.depth, kinds, found)
            for task in tasks:
                request, kind = step.requests[task.row], kinds[task.row]
                self._read[request.request_id] = len(request.token_ids)
                drafts[task.row] = self._draft(task.text, task.chance is not None)
                if len(task.text):
                    self._waiting[request.request_id] = _Waiting(kind, task.text.tokens)
                elif task.was_served:
                    self._payoff.verified(kind, 0, 0)
        return drafts

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how far drafts are accepted; methods learn how far theirs were."""
        if self._is_off:
            return
        for outcome in outcomes:
            self._value.verified(outcome.num_verified)
            waiting = self._waiting.pop(outcome.request_id, None)
            if waiting is None:
                continue
            self._payoff.verified(waiting.kind, outcome.num_drafted, outcome.num_accepted)
            accepted = waiting.tokens[: outcome.num_accepted]
            behind = waiting.tokens[outcome.num_accepted : outcome.num_drafted]
            for method in self._methods:
                method.verified(outcome.request_id, accepted, behind[0] if behind else None)
        for method in self._methods:
            method.settle([outcome.request_id for outcome in outcomes])

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the outcomes that will not come."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._read.pop(request_id, None)
        for method in self._methods:
            method.finish(request_ids)

    def close(self) -> None:
        """Let the methods save what they keep."""
        for method in self._methods:
            method.proposer.close()

    def _draws(self, request: RequestStep) -> bool:
        return self._options.draw and request.may_be_drawn

    def _is_long(self, request: RequestStep) -> bool:
        """Whether the last level saves anything: a view that hides nothing is the whole target."""
        if self._view is None or not self.options.adaptive_length:
            return True
        return self._view.hides(len(request.token_ids))

    def _observe_step(self, step: StepContext) -> TokenCosts:
        """Costs in this step; nothing is known, so nothing held back, with adaptive_length off."""
        costs = self._value.begin(step)
        return costs if self.options.adaptive_length else TokenCosts()

    def _unread(self, step: StepContext, rows: "dict[int, Kind]") -> dict[int, int]:
        """Tokens of each request since the last round that drafted for it."""
        requests = {row: step.requests[row] for row in rows}
        return {
            row: len(request.token_ids) - self._read.get(request.request_id, 0)
            for row, request in requests.items()
        }

    def _round(
        self,
        step: StepContext,
        rows: Sequence[int],
        depth: int,
        kinds: "dict[int, Kind]",
        found: "Sequence[Sequence[Source]]",
    ) -> "list[Task]":
        """Write the drafts of these requests, and count the passes."""
        from vllm_spec_ext.proposers.cascade.round import Task, run_round
        from vllm_spec_ext.proposers.cascade.writing import Writer

        tasks = []
        for row in rows:
            request = step.requests[row]
            sources = [own[row] for own in found] + [None] * len(self._reviewers)
            writer = Writer(self._rungs, sources, int(request.token_ids[-1]))
            room = min(request.room, depth)
            chance = self.chance(request) if kinds[row].is_drawn else None
            writing = writer.write(self._numbers, room)
            tasks.append(Task(row, room, writer.text, writing, chance))
        passes = run_round(self._reviewers, step.requests, tasks, self._lenience)
        for one in passes:
            seconds = self._reviewers[one.level].forward_seconds(one.num_rows)
            self._value.spend(seconds or 0.0)
        self._payoff.drafted(
            [kinds[row] for row in rows],
            [(one.level, one.num_rows, one.num_requests) for one in passes],
            max(len(task.text) for task in tasks),
        )
        return tasks

    @staticmethod
    def chance(request: RequestStep) -> "Chance":
        """What decides the drawn draft of a request in this step."""
        from vllm_spec_ext.proposers.cascade.judging import Noise
        from vllm_spec_ext.proposers.growth.drawing import noise

        return Noise(noise(request.request_id, len(request.token_ids), _NOISE))

    def _draft(self, text: "Text", is_drawn: bool) -> Draft:
        if not len(text):
            return EMPTY_DRAFT
        tokens = np.array(text.tokens, np.int32)
        names = tuple((self._names[maker],) for maker in text.makers)
        if not is_drawn or all(one is None for one in text.drawn_from):
            return Draft(tokens, sources=names)
        return Draft(tokens, probs=_rows(text), sources=names)


def _writes_alone(level: Level) -> bool:
    return isinstance(level, ReviewingLevel) and level.alone


def _rows(text: "Text") -> "torch.Tensor":
    """[n, vocab] what each token was drawn from; a method's guess is certain."""
    import torch

    some = next(one for one in text.drawn_from if one is not None)
    rows = []
    for token, drawn_from in zip(text.tokens, text.drawn_from, strict=True):
        row = drawn_from
        if row is None:
            row = torch.zeros_like(some)
            row[token] = 1.0
        rows.append(row)
    return torch.stack(rows)
