# SPDX-License-Identifier: Apache-2.0
"""What slots are shown instead of bare masks: copies, and what is left of the last draft."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_spec_ext.proposers.base import IntArray, RequestStep
from vllm_spec_ext.proposers.models import BlockFacts, SlotHint
from vllm_spec_ext.proposers.text_index.copied_tokens import copied_tokens
from vllm_spec_ext.proposers.text_index.request_texts import RequestTexts


class _LastDraft(NamedTuple):
    length: int  # tokens of the request when it was made
    tokens: IntArray  # its first path


def rejected_tail(draft: IntArray, following: Sequence[int]) -> IntArray:
    """What is left of a draft behind the token at which it was rejected.

    If the token that came instead stands further behind in the draft, the draft missed what it has
    in between, and goes on behind that place; else one token was another one.

    Args:
        draft: [n] tokens, a chain.
        following: Tokens that came: accepted ones, and the one that the target chose instead.
    """
    num_accepted = len(following) - 1
    if num_accepted >= len(draft):
        return draft[:0]
    behind = draft[num_accepted + 1 :]
    same = np.flatnonzero(behind == following[-1])
    return behind[int(same[0]) + 1 :] if len(same) else behind


class SlotHints:
    """Hints for the requests of one engine."""

    def __init__(self, facts: BlockFacts) -> None:
        """Start without texts.

        Args:
            facts: What the drafter was trained with.
        """
        self._facts = facts
        self._texts = RequestTexts()
        self._drafts: dict[str, _LastDraft] = {}

    def __len__(self) -> int:
        return max(len(self._texts), len(self._drafts))

    def of(self, request: RequestStep, num_slots: int) -> SlotHint | None:
        """What to show the slots of a request; None = nothing."""
        facts = self._facts
        if not facts.copy_match:
            return None
        found = copied_tokens(self._texts.of(request), facts.copy_match, num_slots)
        if found.length:
            return SlotHint(found.tokens, found.length)
        last = self._drafts.get(request.request_id)
        if not facts.reuse_tail or last is None or last.length >= len(request.token_ids):
            return None
        tail = rejected_tail(last.tokens, request.token_ids[last.length :].tolist())
        return SlotHint(tail[:num_slots], facts.copy_match + 1) if len(tail) else None

    def drafted(self, request: RequestStep, tokens: IntArray) -> None:
        """Remember the first path of a draft."""
        if self._facts.reuse_tail:
            self._drafts[request.request_id] = _LastDraft(len(request.token_ids), tokens)

    def forget(self, request_id: str) -> None:
        """A request is gone, known or not."""
        self._texts.forget(request_id)
        self._drafts.pop(request_id, None)
