# SPDX-License-Identifier: Apache-2.0
"""What slots are shown: copies, and the rest of a rejected draft."""

import numpy as np
import pytest

from vllm_spec_ext.proposers.base import RequestStep
from vllm_spec_ext.proposers.models import BlockFacts
from vllm_spec_ext.proposers.nar.hints import SlotHints, rejected_tail


def request(tokens: list[int], name: str = "a") -> RequestStep:
    return RequestStep(name, np.array(tokens, np.int32), 1, tokens[-1:], 4)


@pytest.mark.parametrize(
    ("draft", "following", "expected"),
    [
        ([1, 2, 3, 4], [9], [2, 3, 4]),  # another token came instead of 1
        ([1, 2, 3, 4], [1, 9], [3, 4]),
        ([1, 2, 3, 4], [1, 3], [4]),  # the draft had 2 too much
        ([1, 2, 3, 4], [4], []),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], []),  # all accepted
        ([1, 2, 3, 4], [1, 2, 3, 9], []),
        ([], [7], []),
    ],
)
def test_tail_of_a_rejected_draft(
    draft: list[int], following: list[int], expected: list[int]
) -> None:
    assert rejected_tail(np.array(draft, np.int32), following).tolist() == expected


def test_copies_come_first_and_tails_where_there_are_none() -> None:
    hints = SlotHints(BlockFacts(6, copy_match=4, reuse_tail=True))
    first = request([1, 2, 3, 4, 5, 1, 2, 3])
    found = hints.of(first, 3)
    assert found is not None
    assert found.tokens.tolist() == [4, 5, 1]
    assert found.kind == 3
    hints.drafted(first, np.array([7, 8, 9, 10], np.int32))
    assert len(hints) == 1
    tail = hints.of(request([1, 2, 3, 4, 5, 1, 2, 3, 7, 30]), 2)
    assert tail is not None
    assert tail.tokens.tolist() == [9, 10]
    assert tail.kind == 5
    assert hints.of(request([1, 2], "b"), 2) is None
    assert hints.of(request([1, 2, 3, 4, 5, 1, 2, 3, 7, 8, 9, 10, 40]), 2) is None
    hints.forget("a")
    hints.forget("b")
    hints.forget("unknown")
    assert len(hints) == 0


def test_a_drafter_without_copies_keeps_no_texts() -> None:
    hints = SlotHints(BlockFacts(6))
    assert hints.of(request([1, 2, 1, 2]), 3) is None
    hints.drafted(request([1, 2]), np.array([1], np.int32))
    assert len(hints) == 0
    no_tails = SlotHints(BlockFacts(6, copy_match=4))
    no_tails.drafted(request([1, 2]), np.array([1, 5], np.int32))
    assert no_tails.of(request([1, 2, 3]), 3) is None
