# SPDX-License-Identifier: Apache-2.0
"""The slowest stretch of a run, against times worked out by hand."""

import pytest

from vllm_spec_ext.bench.records import QuestionRecord, TurnRecord
from vllm_spec_ext.bench.windows import NUM_STEPS, slowest_window


def record(
    sizes: list[int], seconds: list[float], stalled: tuple[int, ...] = (), first: int = 0
) -> QuestionRecord:
    tokens = tuple(range(first, first + sum(sizes)))
    turn = TurnRecord(3, tokens, tuple(sizes), seconds[0], sum(seconds), tuple(seconds), stalled)
    return QuestionRecord(0, "a", (turn,))


def plain(num_tokens: int, seconds: float = 1.0, first: int = 0) -> QuestionRecord:
    return record([1] * num_tokens, [9.0, *[seconds] * (num_tokens - 1)], first=first)


def test_a_slow_stretch_between_fast_ones() -> None:
    fast, slow = record([1] + [2] * 300, [5.0] + [1.0] * 300), record([1] * 301, [1.25] * 301)
    own = [fast, slow, fast]
    others = [plain(601), plain(301), plain(601)]
    assert slowest_window(own, others, 1) == pytest.approx(1 / 1.25)
    # A batch of two makes 200 steps of 400 outputs: 300 slow ones and 100 fast ones.
    expected = (300 + 2 * 100) / (300 * 1.25 + 100)
    assert slowest_window(own, others, 2) == pytest.approx(expected)


def test_the_same_tokens_are_compared_not_the_mean() -> None:
    # Plain decoding was slow where the method was.
    own = record([1] + [1] * NUM_STEPS * 2, [1.0] + [1.0] * NUM_STEPS + [3.0] * NUM_STEPS)
    theirs = record([1] + [1] * NUM_STEPS * 2, [1.0] + [1.0] * NUM_STEPS + [3.0] * NUM_STEPS)
    assert slowest_window([own], [theirs], 1) == pytest.approx(1.0)


def test_all_steps_where_there_are_fewer() -> None:
    assert slowest_window([record([1, 2, 1], [1, 1, 4.0])], [plain(4)], 1) == pytest.approx(3 / 5)


def test_steps_beside_another_ones_prefill_say_nothing() -> None:
    own = record([1, 1, 1, 2], [1.0, 2.0, 50.0, 2.0], stalled=(2,))
    theirs = record([1, 1, 1, 1, 1], [1.0, 1.0, 1.0, 3.0, 90.0], stalled=(4,))
    # The token beside a prefill of plain decoding takes what the others take on average.
    assert slowest_window([own], [theirs], 1) == pytest.approx((1 + 3 + 5 / 3) / 4)


def test_another_text_cannot_be_compared() -> None:
    own = [record([1, 1], [1.0, 7.0], first=5), record([1, 1], [1.0, 2.0])]
    assert slowest_window(own, [plain(2), plain(2)], 1) == pytest.approx(1 / 2)
    assert slowest_window(own[:1], [plain(2)], 1) is None
    assert slowest_window([record([1], [1.0])], [plain(1)], 1) is None
