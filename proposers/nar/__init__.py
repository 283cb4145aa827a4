# SPDX-License-Identifier: Apache-2.0
"""Non-autoregressive drafting: a block of masks over the target's hidden states, in one pass.

Generalized aggressive decoding (Xia et al. 2022, GAD) drafts a block of masks with a bidirectional
decoder; DFlash (2602.06036) lets its layers attend to the hidden states of a decoder-only target.
Beyond these, a slot may be filled with a copied token instead of a mask, copies go on behind the
block, and a pairwise selector makes a slot's candidates depend on the token before, for chains and
for trees.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    ModelSpec,
    Needs,
    RequestStep,
    StepContext,
    StepOutcome,
    TargetFacts,
    proposer,
)
from vllm_spec_ext.proposers.draft_tree import is_branching
from vllm_spec_ext.proposers.models import SlotHint
from vllm_spec_ext.proposers.nar.copy_tail import LONGEST, CopyTail, with_tail
from vllm_spec_ext.proposers.nar.options import NarOptions
from vllm_spec_ext.proposers.nar.pass_payoff import PassPayoff
from vllm_spec_ext.proposers.payoff import branches
from vllm_spec_ext.proposers.payoff.node_payoff import NodePayoff

if TYPE_CHECKING:
    from vllm_spec_ext.proposers.models import BlockDrafter, BlockWeights, SlotCandidates
    from vllm_spec_ext.proposers.nar.hints import SlotHints
    from vllm_spec_ext.proposers.nar.versions import Version


@proposer(
    "nar",
    summary="A block of masks over the target's hidden states drafts several tokens in one pass.",
    options=NarOptions,
    num_speculative_tokens=8,
    needs_checkpoint=True,
    tree=True,
    best_for="any text, where a DFlash checkpoint of the target exists",
    cost="one pass of a few layers over a handful of rows, and their vocabulary projection",
)
class Nar(BaseProposer):
    """Chain of the slots' likeliest tokens, or a tree of their candidates."""

    steps_a_turn = 1  # only a version's first use takes time

    def __init__(self, options: MethodOptions) -> None:
        """Keep the options; the drafter comes with :meth:`start`."""
        super().__init__(options)
        self._options = cast(NarOptions, options)
        self.needs = Needs(distributions=self._options.draw)
        self._drafter: BlockDrafter | None = None
        self._hints: SlotHints | None = None
        self._payoff = NodePayoff()
        self._pass = PassPayoff()
        self._tail = CopyTail()
        self._first: Version | None = None  # the first that was read, with `online`

    @classmethod
    def check(cls, options: MethodOptions, target: TargetFacts) -> None:
        """More masks than draft tokens; raises SpecExtError.

        Blocks would leave their requests' KV blocks by more than is set aside for that.
        """
        slots, most = cast(NarOptions, options).slots, target.num_speculative_tokens
        if slots is not None and slots > most and not target.is_level:
            raise SpecExtError(
                f"slots: found {slots}, expected at most num_speculative_tokens, {most}: no draft "
                "gets longer; lower slots, or raise num_speculative_tokens"
            )

    @classmethod
    def models(cls, options: MethodOptions) -> Sequence[ModelSpec]:
        """The drafter."""
        return [ModelSpec("nar", cast(NarOptions, options).model, kind="dflash")]

    @classmethod
    def drafter_folder(cls, options: MethodOptions) -> Path:
        """Where the drafter is; raises SpecExtError if it is none that can be trained."""
        from vllm_spec_ext.proposers.nar.versions import drafter_folder

        return drafter_folder(cast(NarOptions, options).model)

    @classmethod
    def drafter_files(cls, options: MethodOptions) -> Mapping[str, bytes]:
        """The drafter's configuration and weights; raises as :meth:`drafter_folder`."""
        from vllm_spec_ext.proposers.nar.versions import drafter_files

        return drafter_files(cls.drafter_folder(options))

    @property
    def student_facts(self) -> Mapping[str, int]:
        """Masks of a block, which see each other; copies in them; candidates of the selector."""
        facts = {"slots": self._num_slots, "candidates": self._num_candidates}
        return {**facts, "copies": int(self._hints is not None)}

    def read_weights(self, folder: Path) -> "BlockWeights":
        """Weights of the same shape that make the context alike; raises SpecExtError for others."""
        from vllm_spec_ext.proposers.nar.versions import check_same_drafter, read_version

        found = read_version(folder)
        if self._first is None:
            self._first = found
        check_same_drafter(self._first, found, folder)
        return found.weights

    def use_weights(self, weights: object) -> None:
        """Draft with these; on all ranks."""
        cast("BlockDrafter", self._drafter).exchange(cast("BlockWeights", weights))

    def start(self, engine: EngineHandle) -> None:
        """Take the drafter that the engine has loaded.

        Raises:
            SpecExtError: There is no engine that runs models, as in a replay of recorded texts.
        """
        from vllm_spec_ext.proposers.nar.hints import SlotHints
        from vllm_spec_ext.proposers.text_index.occurrence_index import warm_up

        if len(engine.block_drafters) != 1:
            raise SpecExtError(
                f"{self.info.name}: found {len(engine.block_drafters)} loaded drafters, expected "
                "1; only an engine runs them, so measure with `vllm-spec bench` or `plan`"
            )
        (self._drafter,) = engine.block_drafters
        facts = self._drafter.facts
        asked = self._options.slots or engine.num_speculative_tokens
        self._num_slots = min(asked, facts.num_slots)
        # Where nothing chooses among them, one is enough.
        chooses = self._options.tree or self._options.draw or facts.has_selector
        self._num_candidates = self._options.candidates if chooses else 1
        self._vocab_size = engine.vocab_size
        self._hints = SlotHints(facts) if self._options.copies and facts.copy_match else None
        if self._hints is not None:
            warm_up()
        if self._options.tree:
            one = np.zeros((1, 1, 1), np.float32)
            self._tree(one, np.zeros((1, 1), np.int32), 1, -math.inf)
            branches.warm_up()

    def propose(self, step: StepContext) -> list[Draft]:
        """One draft per request; empty where there is no room."""
        drafts = [EMPTY_DRAFT] * len(step.requests)
        rows = [row for row, request in enumerate(step.requests) if request.room > 0]
        self._pass.begin(step)
        if self._drafter is None or not rows:
            return drafts
        for row in rows:
            self._payoff.forget(step.requests[row].request_id)  # a draft that had no outcome
            self._tail.forget(step.requests[row].request_id)
        confidence = self._confidence(step.min_probability)
        seconds = self._drafter.forward_seconds(len(rows) * (1 + self._num_slots))
        if confidence > 1.0:
            return drafts
        if self._options.adaptive_length and not self._pass.pays(len(rows), seconds):
            return drafts
        copies = [self._copy(step.requests[row]) for row in rows]
        hints = None
        if self._hints is not None:
            shown = slice(self._num_slots)
            hints = [copy and SlotHint(copy.tokens[shown], copy.kind) for copy in copies]
        predicted = self._drafter.predict(
            step.requests, rows, self._num_slots, self._num_candidates, hints
        )
        self._pass.ran(seconds)
        limit = math.log(confidence) if confidence > 0.0 else -math.inf
        for row, found, copy in zip(rows, predicted, copies, strict=True):
            if found is None:
                continue
            request = step.requests[row]
            draft = self._draft(request, found, copy, limit)
            if self._options.adaptive_length:
                draft = branches.without_dear_branches(draft, step, self._payoff.acceptance)
            drafts[row] = draft
            if draft.path_probs is not None and len(draft):
                self._payoff.drafted(request.request_id, draft.path_probs)
                self._tail.drafted(request.request_id, draft, self._num_slots)
            if self._hints is not None:
                self._hints.drafted(request, _first_path(draft))
        return drafts

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how far the drafter's probabilities can be trusted."""
        for outcome in outcomes:
            self._payoff.verified(outcome.request_id, outcome.num_drafted, outcome.accepted)
            self._tail.verified(outcome.request_id, outcome.num_drafted, outcome.accepted)
            self._pass.observe(outcome)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the outcomes that will not come, and the texts."""
        for request_id in request_ids:
            self._payoff.forget(request_id)
            self._tail.forget(request_id)
            if self._hints is not None:
                self._hints.forget(request_id)

    def _confidence(self, min_probability: float | None) -> float:
        """Least path probability of a node that is drafted; 0 drafts all."""
        least = self._options.min_confidence
        if self._options.adaptive_length and min_probability is not None:
            least = max(least, self._payoff.confidence(min_probability))
        return least

    def _copy(self, request: RequestStep) -> SlotHint | None:
        """What to show the slots of a request, and what follows it, as far as there is room."""
        if self._hints is None:
            return None
        behind = max(0, min(request.room - self._num_slots, LONGEST))
        return self._hints.of(request, self._num_slots + behind)

    def _draft(
        self, request: RequestStep, found: "SlotCandidates", copy: SlotHint | None, limit: float
    ) -> Draft:
        if self._options.draw and request.may_be_drawn:
            from vllm_spec_ext.proposers.nar.drawing import drawn_chain

            return drawn_chain(request, found, limit, self._vocab_size)
        if copy is not None and len(found.tokens) == self._num_slots:
            shown, behind = np.split(copy.tokens, [self._num_slots])
            beyond = np.flatnonzero(behind >= self._vocab_size)  # of pictures, in a prompt
            behind = behind[: beyond[0]] if len(beyond) else behind
            found = with_tail(found, shown, behind, self._tail.probability)
        if self._options.tree:
            return self._tree(found.log_probs, found.tokens, request.room, limit)
        return self._chain(found, limit)

    @staticmethod
    def _chain(found: "SlotCandidates", limit: float) -> Draft:
        from vllm_spec_ext.proposers.nar.tree import best_chain

        places, paths = best_chain(found.log_probs)
        # Cumulative log-probabilities only fall; a copy that the chain left goes on nowhere.
        length = int(((paths >= limit) & (paths > -math.inf)).sum())
        if not length:
            return EMPTY_DRAFT
        tokens = found.tokens[np.arange(length), places[:length]]
        return Draft(tokens, path_probs=np.exp(paths[:length]))

    @staticmethod
    def _tree(
        log_probs: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]",
        tokens: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]",
        room: int,
        limit: float,
    ) -> Draft:
        from vllm_spec_ext.proposers.nar.tree import best_tree

        slots, places, parents, paths = best_tree(np.ascontiguousarray(log_probs), room, limit)
        if not len(slots):
            return EMPTY_DRAFT
        drafted = np.ascontiguousarray(tokens[slots, places])
        probs = np.exp(paths)
        if not is_branching(parents.tolist()):
            return Draft(drafted, path_probs=probs)  # no branch: the plain path is cheaper
        return Draft(drafted, parents, path_probs=probs)


def _first_path(draft: Draft) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    """Tokens of the path that the drafter believes in most, which stands first."""
    if draft.parents is None:
        return draft.tokens
    length = 0
    while length < len(draft) and int(draft.parents[length]) == length - 1:
        length += 1
    return draft.tokens[:length]
