# SPDX-License-Identifier: Apache-2.0
"""Copies and tri-grams in one chain: tri-grams go on where a copy ends, or stand in its place.

A copy of few agreeing tokens gives way to a token that tri-grams are surer of. The device drafts so
(``late_kernels.walk_tables``); here is the same on the host, which learns of it one step later.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_spec_ext.proposers.adaptive_ngram.drafter import NgramDrafter, TextEnd
from vllm_spec_ext.proposers.base import EMPTY_DRAFT, IntArray, StepContext

WEAK = 2  # agreeing tokens up to which a copy gives way to what is likelier
GIVES_WAY = 0.4  # probability of a token by tri-grams from which on it is
"""Replayed on 124 answers of SmolLM2-135M with tri-grams of 312 others, 8 tokens a step: of all
bounds from 0.2 to 0.6 this one was best where requests share nothing, and 0.5 % behind the best
where they do."""


class Copied(NamedTuple):
    """What was copied for a request."""

    tokens: IntArray
    num_before: int  # tokens that agree before them

    @property
    def may_give_way(self) -> bool:
        """Whether tri-grams are asked for something better."""
        return len(self.tokens) > 0 and self.num_before <= WEAK


class Chain(NamedTuple):
    """A request's draft."""

    copied: IntArray
    behind: IntArray  # by tri-grams


def behind_copies(
    drafter: NgramDrafter, step: StepContext, copies: Sequence[Copied]
) -> list[Chain]:
    """Draft for texts whose last tokens are not learned.

    Args:
        drafter: Of chains.
        step: All tokens are given.
        copies: Of each request.
    """
    slot_of = drafter.learner.slot
    ends = [drafter.end_of(request, slot_of(request.request_id)) for request in step.requests]
    kept = [copy.tokens for copy in copies]
    weak = [row for row, copy in enumerate(copies) if copy.may_give_way]
    others = drafter.chains_from([ends[row]._replace(room=min(1, ends[row].room)) for row in weak])
    for row, (tokens, probability) in zip(weak, others, strict=True):
        if probability >= GIVES_WAY and tokens[0] != kept[row][0]:
            kept[row] = EMPTY_DRAFT.tokens
    longest = drafter.max_depth
    behind = [_behind(end, tokens, longest) for end, tokens in zip(ends, kept, strict=True)]
    chains = drafter.chains_from(behind)
    return [Chain(tokens, more) for tokens, (more, _) in zip(kept, chains, strict=True)]


def _behind(end: TextEnd, tokens: IntArray, longest: int) -> TextEnd:
    """The end of a text, had these tokens been said, too; they count in the length of a chain."""
    room = max(0, min(end.room, longest) - len(tokens))
    before, last = [end.before, end.last, *tokens[-2:].tolist()][-2:]
    return end._replace(before=before, last=last, room=room)
