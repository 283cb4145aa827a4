# SPDX-License-Identifier: Apache-2.0
"""All sources of drafts in one tree: copies, repetitions, answers, a corpus, a drafter.

Each source is best on other text. Here every node of the tree asks all of them for its next tokens;
what speaks for a token becomes a probability (:mod:`..candidates.calibration`), and the nodes with
the largest path probabilities are drafted, over all requests of the step, as far as they pay
(:mod:`..candidates.node_choice`). A trained drafter is asked only where it adds more than it costs.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from vllm_spec_ext.options import MethodOptions, RequestOptions
from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram
from vllm_spec_ext.proposers.auto.drafter_payoff import DrafterPayoff
from vllm_spec_ext.proposers.auto.late_auto import LateAuto, ngrams_of, why_not_late
from vllm_spec_ext.proposers.auto.options import AutoOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    LateDrafter,
    ModelSpec,
    Needs,
    RequestFacts,
    RequestLimits,
    StepContext,
    StepOutcome,
    TargetFacts,
    ViewSpec,
    proposer,
)
from vllm_spec_ext.proposers.candidates.evidence import NAMES
from vllm_spec_ext.proposers.candidates.given_drafts import given_by
from vllm_spec_ext.proposers.candidates.lookup import Candidates, Lookup
from vllm_spec_ext.proposers.candidates.node_choice import expected_gain
from vllm_spec_ext.proposers.candidates.recycled_rows import NUM_KEPT
from vllm_spec_ext.proposers.corpus.store import open_store
from vllm_spec_ext.proposers.followed_drafts import FollowedDrafts
from vllm_spec_ext.proposers.inner_method import asked_of
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions, InputCopyRequest
from vllm_spec_ext.proposers.payoff.forward_payoff import TokenCosts, TokenSeconds

if TYPE_CHECKING:
    from vllm_spec_ext.proposers.candidates.tree_drafts import TreeDrafts


@proposer(
    "auto",
    summary="Every source of drafts in one tree: copies, repetitions, a corpus, a drafter.",
    options=AutoOptions,
    request_options=InputCopyRequest,
    num_speculative_tokens=32,
    tree=True,
    best_for="all kinds of text (where most is copied, input_copy is faster on a CPU)",
    cost="tenths of a millisecond a step, and the drafter's pass where it pays",
)
class Auto(BaseProposer):
    """See the module docstring."""

    _lookup: Lookup
    _drafts: "TreeDrafts"

    def __init__(self, options: MethodOptions) -> None:
        """Keep the options; a drafter's model comes with :meth:`start`."""
        super().__init__(options)
        self._options = cast(AutoOptions, options)
        self._copy: InputCopy | None = None
        if self._options.copy_input:
            # What it finds elsewhere than in the message, or in several places, is looked up here.
            self._copy = InputCopy(
                InputCopyOptions(
                    source="last_user", match="unique", also_output=False, earlier_answers=0
                )
            )
        self._drafter: BaseProposer | None = None
        asked = self._options.drafter
        if asked is not None:
            self._drafter = asked.proposer()(asked.parsed)
        inner = Needs() if self._drafter is None else self._drafter.needs
        self.needs = Needs(
            hidden_states=inner.hidden_states,
            next_tokens=max(inner.next_tokens, NUM_KEPT if self._options.recycled_contexts else 0),
            shares_nodes=True,
            every_step=inner.every_step,
        )
        self._drafts_by_level = False  # each further level takes a pass, which has to pay
        self._followed = FollowedDrafts()
        self._late: LateAuto | None = None  # drafts alone, where the scheduler does not wait
        self._payoff = DrafterPayoff()
        self._value = TokenSeconds()

    @classmethod
    def check(cls, options: MethodOptions, target: TargetFacts) -> None:
        """A corpus that cannot be read, and what the drafter checks; raises SpecExtError."""
        given = cast(AutoOptions, options)
        if given.corpus is not None:
            open_store(given.corpus, target)
        asked = given.drafter
        if asked is not None:
            asked.proposer().check(asked.parsed, replace(target, is_level=True))

    @classmethod
    def models(cls, options: MethodOptions) -> Sequence[ModelSpec]:
        """The drafter's."""
        asked = cast(AutoOptions, options).drafter
        return () if asked is None else asked.proposer().models(asked.parsed)

    @classmethod
    def views(cls, options: MethodOptions) -> Sequence[ViewSpec]:
        """The drafter's."""
        asked = cast(AutoOptions, options).drafter
        return () if asked is None else asked.proposer().views(asked.parsed)

    @classmethod
    def drafts_late(cls, options: MethodOptions) -> bool:
        """Without a drafter, or with one that does; with a corpus if that is small for sure."""
        asked = cast(AutoOptions, options)
        ngrams = ngrams_of(asked)
        return why_not_late(asked) is None and (ngrams is None or ngrams.fits_a_device)

    @staticmethod
    def check_request(options: RequestOptions, limits: RequestLimits) -> None:
        """As of ``input_copy``; raises RequestOptionError."""
        InputCopy.check_request(options, limits)

    @staticmethod
    def resolve_request(options: RequestOptions, facts: RequestFacts) -> InputCopyRequest:
        """As of ``input_copy``; raises RequestOptionError."""
        return InputCopy.resolve_request(options, facts)

    def start(self, engine: EngineHandle) -> None:
        """Start the sources, and compile the search."""
        from vllm_spec_ext.proposers.candidates.tree_drafts import TreeDrafts

        options = self._options
        self._lookup = Lookup(
            engine.vocab_size,
            own_text=options.own_text,
            earlier_answers=options.earlier_answers,
            recycled_contexts=options.recycled_contexts,
            max_cache_salts=options.max_cache_salts,
            max_ngram=options.max_ngram,
            corpus=None if options.corpus is None else open_store(options.corpus, engine).arrays,
        )
        if self._copy is not None:
            self._copy.start(engine)
        drafter = ""
        if self._drafter is not None:
            self._drafter.start(replace(engine, is_level=True))
            self._drafts_by_level = bool(engine.models)
            drafter = self._drafter.info.name
        self._drafts = TreeDrafts((*NAMES, drafter), options.adaptive_length)

    def late_drafter(self, engine: EngineHandle) -> LateDrafter | str:
        """Copies of the input, the request's own output and earlier answers; heads before them,
        and tri-grams behind them."""
        reason = why_not_late(self._options)
        if reason is not None:
            return reason
        wanted, ngrams = ngrams_of(self._options), None
        if wanted is not None:
            ngrams = AdaptiveNgram(wanted)
            ngrams.start(engine)
            reason = ngrams.why_not_late()
            if reason is not None:
                return reason
        asked, chains = self._options.drafter, None
        if asked is not None:
            chains = asked.proposer()(asked.as_chain)
            chains.start(replace(engine, is_level=True))
        return LateAuto(self._options, engine, chains, ngrams, self._begin_late)

    def _begin_late(self, late: LateAuto) -> None:
        if self._drafter is not None:
            self._drafter.close()  # it drafts trees
        self._late, self._drafter, self.needs = late, late.drafter, late.needs

    def propose(self, step: StepContext) -> list[Draft]:
        """A tree for each request, as far as its nodes pay."""
        if self._late is not None:
            return self._late.propose(step)
        costs = self._value.begin(step)
        if self._drafter is not None:
            self._drafter.observe(self._followed.follow(step.requests))
        for request in step.requests:
            if request.options.enabled:
                self._lookup.follow(request)
        copies: Sequence[Draft | None] = [None] * len(step.requests)
        if not any(request.room for request in step.requests):
            return [EMPTY_DRAFT] * len(copies)
        if self._copy is not None:
            # All of it, whatever it costs: how much is drafted is decided here.
            copies = self._copy.propose(StepContext(step.requests))
        trees = self._grow(step, copies, [None] * len(copies))
        rows = [row for row, tree in enumerate(trees) if tree is not None]
        if self._drafter is not None and rows:
            self._ask_drafter(step, costs, copies, trees, rows)
        return self._drafts.make(step, trees)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how much the sources are worth."""
        if self._late is not None:
            self._late.observe(outcomes)
            return
        # Copies are not told: the probabilities that they begin with say which kind of copy it is,
        # and what each kind is worth is learned here.
        self._drafts.observe(outcomes)
        self._value.verified(sum(outcome.num_verified for outcome in outcomes))

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the requests, and keep their answers for later ones."""
        for request_id in request_ids:
            self._lookup.finish(request_id)
            self._drafts.calibration.forget(request_id)
        self._followed.forget(request_ids)
        for source in (self._copy, self._drafter, self._late):
            if source is not None:
                source.finish(request_ids)

    def close(self) -> None:
        """Let the drafter save what it keeps."""
        if self._drafter is not None:
            self._drafter.close()

    def _grow(
        self,
        step: StepContext,
        copies: Sequence[Draft | None],
        drafted: Sequence[Draft | None],
    ) -> list[Candidates | None]:
        """The best tree of each request; None where there is no room."""
        costs = self._drafts.costs(step)
        return [
            self._drafts.grow(self._lookup, request, costs, given_by(copy, draft))
            if request.room > 0 and request.options.enabled
            else None
            for request, copy, draft in zip(step.requests, copies, drafted, strict=True)
        ]

    def _ask_drafter(
        self,
        step: StepContext,
        costs: TokenCosts,
        copies: Sequence[Draft | None],
        trees: list[Candidates | None],
        rows: Sequence[int],
    ) -> None:
        """Grow the trees again with the drafter's candidates, if it is likely to pay."""
        assert self._drafter is not None
        least = self._drafts.costs(step).node
        before = [_expected(trees[row], least) for row in rows]
        adaptive = self.options.adaptive_length
        only_others = step.is_shadow and any(before)
        if adaptive and not self._payoff.pays(before, costs, only_others=only_others):
            return
        started = time.perf_counter()
        info = self._drafter.info
        asked = [
            replace(asked_of(info, request), room=request.room if row in rows else 0)
            for row, request in enumerate(step.requests)
        ]
        # How much of one pass's drafts is of use is decided here; how many passes are, there.
        given = StepContext(asked, step.hidden_states)
        if self._drafts_by_level:
            given = replace(
                given, min_probability=step.min_probability, plain_seconds=step.plain_seconds
            )
        drafted = self._drafter.propose(given)
        seconds = time.perf_counter() - started
        self._value.spend(seconds)
        if self._drafts_by_level and not any(map(len, drafted)):
            return  # by what it knows itself no pass pays
        self._followed.keep(step.requests, drafted)
        trees[:] = self._grow(step, copies, drafted)
        after = [_expected(trees[row], least) for row in rows]
        self._payoff.asked(before, after, seconds)


def _expected(tree: Candidates | None, least: float) -> float:
    return 0.0 if tree is None else expected_gain(tree.paths, least)
