# SPDX-License-Identifier: Apache-2.0
"""The first levels of a cascade: methods that guess, and learn from what is verified alone.

A method may change when it is asked: it follows the text with cursors and counts what it sees. So
it is never shown what the levels write, only verified tokens, once a step. Its draft is reviewed in
chunks, as far as the text goes on as it says; behind another token the rest of it is void. A method
that has :class:`vllm_spec_ext.proposers.base.Continues` is asked again there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_spec_ext.proposers.base import (
    BaseProposer,
    Continues,
    Draft,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.cascade.judging import Distribution
from vllm_spec_ext.proposers.inner_method import asked_of


@dataclass(eq=False)
class Source:
    """What one method has for one request in one step."""

    request_id: str
    tokens: list[int]  # its draft's first path
    drawn_from: list[Distribution]
    continues: Continues | None
    vocab_size: int  # of the target
    num_judged: int = 0
    num_accepted: int = 0

    def following(
        self, written: Sequence[int], most: int
    ) -> tuple[list[int], Sequence[Distribution]]:
        """What it foresees behind what was written; may be nothing.

        Args:
            written: Behind the verified tokens; not verified itself.
            most: Tokens wanted.

        Returns:
            Tokens, and what each was drawn from.
        """
        start = len(written)
        if most < 1:
            return [], []
        if self._is_own(written) and start < len(self.tokens):
            return self.tokens[start : start + most], self.drawn_from[start : start + most]
        if self.continues is None:
            return [], []
        found = self.continues.continue_from(self.request_id, written, most)
        tokens = sayable([int(token) for token in found[:most]], self.vocab_size)
        return tokens, [None] * len(tokens)

    def judged(self, text: Sequence[int], rejected: int | None = None) -> None:
        """Compare its draft with what was made of the text; the first to reject a token decides.

        Args:
            text: What stands behind the verified tokens.
            rejected: The token that was rejected there, if any was and none took its place yet.
        """
        if self.num_judged > self.num_accepted:
            return
        agreeing = _common(self.tokens, text)
        if agreeing < self.num_accepted or agreeing == len(self.tokens):
            self.num_accepted = self.num_judged = max(self.num_accepted, agreeing)
            return
        is_wrong = agreeing < len(text) or rejected == self.tokens[agreeing]
        self.num_accepted, self.num_judged = agreeing, agreeing + is_wrong

    def outcome(self) -> StepOutcome | None:
        """For the method; None if nobody judged its draft."""
        if not self.num_judged:
            return None
        return StepOutcome(self.request_id, self.num_judged, self.num_accepted)

    def _is_own(self, written: Sequence[int]) -> bool:
        return list(written) == self.tokens[: len(written)]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the beginning that two texts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class Method:
    """One method as a level; lives as long as the engine."""

    def __init__(self, proposer: BaseProposer, vocab_size: int) -> None:
        """Use a proposer that was started, or will be, with a target of this vocabulary."""
        self.proposer = proposer
        self._vocab_size = vocab_size
        self.name = proposer.info.name
        self._continues = proposer if isinstance(proposer, Continues) else None
        self._waiting: dict[str, Source] = {}

    def ask(self, step: StepContext) -> list[Source]:
        """What it has for each request of a step; with room 0 it only sees the new tokens."""
        asked = [asked_of(self.proposer.info, request) for request in step.requests]
        self._report([request.request_id for request in step.requests if request.room > 0])
        # No clock, either: what a token costs the target is not what it costs the level above.
        drafts = self.proposer.propose(StepContext(asked, step.hidden_states))
        found = []
        for request, draft in zip(step.requests, drafts, strict=True):
            source = self._source(request, draft)
            found.append(source)
            if request.room > 0:
                self._waiting[request.request_id] = source
        return found

    def verified(self, request_id: str, accepted: Sequence[int], rejected: int | None) -> None:
        """The target's verdict, on what no level reviewed.

        Args:
            request_id: Whose.
            accepted: Leading tokens of the whole draft that the target accepted.
            rejected: The one behind these, if there was one.
        """
        source = self._waiting.get(request_id)
        if source is not None:
            source.judged(accepted, rejected)

    def settle(self, request_ids: Sequence[str]) -> None:
        """The target has said what it says of these requests' drafts."""
        self._report(request_ids)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Requests that are gone."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
        self.proposer.finish(request_ids)

    def _report(self, request_ids: Sequence[str]) -> None:
        sources = [self._waiting.pop(request_id, None) for request_id in request_ids]
        outcomes = [source.outcome() for source in sources if source is not None]
        self.proposer.observe([outcome for outcome in outcomes if outcome is not None])

    def _source(self, request: RequestStep, draft: Draft) -> Source:
        tokens = sayable(draft.tokens[: first_path(draft)].tolist(), self._vocab_size)
        length = len(tokens)
        drawn: list[Distribution] = [None] * length
        if draft.probs is not None:
            drawn = list(draft.probs[:length])
        return Source(request.request_id, tokens, drawn, self._continues, self._vocab_size)


def sayable(tokens: list[int], vocab_size: int) -> list[int]:
    """The tokens before the first one that no model can say; prompts may have such."""
    end = next((i for i, token in enumerate(tokens) if token >= vocab_size), len(tokens))
    return tokens[:end]


def first_path(draft: Draft) -> int:
    """Nodes of the path that a draft begins with, which its method believes in most."""
    if draft.parents is None:
        return len(draft)
    parents = draft.parents.tolist()
    return next((node for node, up in enumerate(parents) if up != node - 1), len(parents))
