# SPDX-License-Identifier: Apache-2.0
"""What followed when the end of a text occurred before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spec_ext.proposers.text_index.copied_tokens import copied_tokens
from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex


def index_of(text: list[int]) -> OccurrenceIndex:
    """An index of this text."""
    index = OccurrenceIndex()
    index.append(np.array(text, np.int32))
    return index


@pytest.mark.parametrize(
    ("text", "expected", "length"),
    [
        ([], [0, 0, 0], 0),
        ([1, 2, 3], [0, 0, 0], 0),
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5], 2),
        ([1, 2, 3, 9, 2, 7, 8, 6, 1, 2], [3, 9, 2], 2),  # the longer match, not the later one
        ([1, 2, 3, 1, 2, 4, 5, 6, 1, 2], [4, 5, 6], 2),  # of equal ones the latest
        ([1, 2, 3, 1, 2], [3, 1, 2], 2),  # goes on with its own continuation
        ([7, 7], [7, 7, 7], 1),
        ([1, 2, 3, 4, 9, 9, 1, 2, 3], [4, 9, 9], 3),
    ],
)
def test_copied_tokens(text: list[int], expected: list[int], length: int) -> None:
    found = copied_tokens(index_of(text), 8, 3)
    assert found.tokens.dtype == np.int32
    assert found.tokens.tolist() == expected
    assert found.length == length


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6), st.integers(1, 5))
def test_agrees_with_a_plain_search(text: list[int], longest: int, count: int) -> None:
    best, place = 0, 0
    for end in range(1, len(text)):
        length = 0
        while length < min(longest, end) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length and length >= best:
            best, place = length, end
    going_on = list(text)
    for _ in range(count if best else 0):
        going_on.append(going_on[place + len(going_on) - len(text)])
    found = copied_tokens(index_of(text), longest, count)
    assert found.length == best
    assert found.tokens.tolist() == (going_on[len(text) :] if best else [0] * count)
