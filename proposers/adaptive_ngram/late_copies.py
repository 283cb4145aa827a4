# SPDX-License-Identifier: Apache-2.0
"""Copies and tri-grams in one chain: tri-grams go on where a copy ends, or stand in its place.

A copy of few agreeing tokens gives way to a token that tri-grams are surer of. The device drafts so
(``late_kernels.walk_tables``); here is the same on the host, which learns of it one step later.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vllm_spec_ext.proposers.adaptive_ngram.drafter import NgramDrafter
from vllm_spec_ext.proposers.base import EMPTY_DRAFT, Draft, IntArray, RequestStep, StepContext

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
    pairs = list(zip(step.requests, copies, strict=True))
    weak = [replace(one, room=min(one.room, int(copy.may_give_way))) for one, copy in pairs]
    instead = drafter.drafts_behind(StepContext(weak))
    kept = [
        EMPTY_DRAFT.tokens if _is_better(other, copy) else copy.tokens
        for other, copy in zip(instead, copies, strict=True)
    ]
    longer = [
        _behind(request, tokens, drafter.max_depth)
        for request, tokens in zip(step.requests, kept, strict=True)
    ]
    drafts = drafter.drafts_behind(StepContext(longer))
    return [Chain(tokens, draft.tokens) for tokens, draft in zip(kept, drafts, strict=True)]


def _is_better(other: Draft, copy: Copied) -> bool:
    if not len(other) or other.path_probs is None:
        return False
    return bool(other.path_probs[0] >= GIVES_WAY and other.tokens[0] != copy.tokens[0])


def _behind(request: RequestStep, tokens: IntArray, max_depth: int) -> RequestStep:
    """The request, had it said these tokens, too; a chain is no longer than that with them."""
    return replace(
        request,
        token_ids=np.concatenate([request.token_ids[-2:], tokens]),
        room=max(0, min(request.room, max_depth) - len(tokens)),
    )
