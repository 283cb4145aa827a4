# SPDX-License-Identifier: Apache-2.0
"""Tokens and rounds of cascades, against a simulation that accepts tokens one by one."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spec_ext.bench.cascade_plan import (
    InTurn,
    Lookup,
    Model,
    expected_tokens,
    review_rounds,
    step_of,
)

RUNS = 4000


def flip(chance: random.Random, rates: list[float]) -> int:
    """How many of a chunk stand: up to the first that does not."""
    for place, rate in enumerate(rates):
        if chance.random() >= rate:
            return place
    return len(rates)


def free(rows: int) -> float:
    return 0.0


def one(rows: int) -> float:
    return 1.0


def mean(draw: Callable[[random.Random], float], seed: int = 0) -> float:
    chance = random.Random(seed)
    return sum(draw(chance) for _ in range(RUNS)) / RUNS


@pytest.mark.parametrize("rates", [[], [0.0], [1.0, 1.0], [0.9] * 6, [0.8, 0.8, 0.3, 0.3]])
def test_expected_tokens_are_those_of_a_simulation(rates: list[float]) -> None:
    found = mean(lambda chance: 1 + flip(chance, rates))
    assert expected_tokens(rates) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("rate", "chunk", "wanted"), [(0.5, 2, 6), (0.9, 4, 9), (0.3, 1, 1)])
def test_rounds_of_review_are_those_of_a_simulation(
    rate: float, chunk: int, wanted: int, batch_size: int
) -> None:
    """Two levels: the one that reviews takes a pass a round, until all requests have enough."""

    def draw(chance: random.Random) -> list[int]:
        have, sizes = [0] * batch_size, []
        while min(have) < wanted:
            chunks = [min(chunk, wanted - n - 1) for n in have if n < wanted]
            sizes.append(max(chunks))
            have = [
                n + 1 + flip(chance, [rate] * min(chunk, wanted - n - 1)) if n < wanted else n
                for n in have
            ]
        return sizes

    chance = random.Random(1)
    seen = [draw(chance) for _ in range(RUNS)]
    counts = review_rounds((rate,) * chunk, wanted, batch_size)
    for size, count in enumerate(counts):
        average = sum(sizes.count(size) for sizes in seen) / RUNS
        assert count == pytest.approx(average, abs=0.06)


def test_three_levels_cost_what_a_simulation_pays() -> None:
    """A lookup is reviewed by a small model, that by a view, and the view by the target."""
    rates, lengths = (0.9, 0.6, 0.5), (6, 3, 2)  # view, small model, lookup
    prices = (7.0, 1.0)  # of a pass of the view, and of the small model

    def small(chance: random.Random, wanted: int) -> float:
        have, paid = 0, 0.0
        while have < wanted:
            have += 1 + flip(chance, [rates[2]] * min(lengths[2], wanted - have - 1))
            paid += prices[1]
        return paid

    def view(chance: random.Random) -> float:
        have, paid = 0, 0.0
        while have < lengths[0]:
            chunk = min(lengths[1], lengths[0] - have - 1)
            paid += small(chance, chunk) + prices[0]
            have += 1 + flip(chance, [rates[1]] * chunk)
        return paid

    lookup = Lookup(rates[2])
    inner = Model(rates[1], lambda rows: prices[1], lookup, lengths[2])
    cascade = Model(rates[0], lambda rows: prices[0], inner, lengths[1])
    assert cascade.seconds(lengths[0], 1) == pytest.approx(mean(view), rel=0.03)
    step = step_of(cascade, lengths[0], 1, lambda rows: 20.0, once_s=0.5)
    assert step.tokens == pytest.approx(sum(0.9**i for i in range(7)))
    assert step.seconds == pytest.approx(20.5 + mean(view), rel=0.03)
    assert step.num_drafted == 6


def test_a_model_without_an_inner_level_drafts_token_by_token() -> None:
    rows: list[int] = []

    def forward(count: int) -> float:
        rows.append(count)
        return 2.0

    assert Model(0.9, forward).seconds(5, 3) == pytest.approx(10.0)
    assert rows == [3]
    assert Model(0.9, forward).seconds(0, 3) == 0.0


def test_a_review_pass_has_the_chunk_and_one_row_more() -> None:
    rows: list[int] = []

    def forward(count: int) -> float:
        rows.append(count)
        return 1.0

    perfect = Model(0.9, forward, Lookup(1.0, 0.25), 3)
    # Chunks of 3 and of 1 give 4 and 2 tokens; two requests look up, each for itself.
    assert perfect.seconds(6, 2) == pytest.approx(2 * (1.0 + 2 * 0.25))
    assert sorted(rows) == [4, 8]


def test_the_tail_of_a_draft_comes_from_another_level() -> None:
    """Horizontal: CS-Drafting's expected walltime improvement factor, equation of section 3.2."""
    cascade = InTurn(((Model(0.8, one), 2), (Lookup(0.3), 3)))
    assert cascade.acceptance(4) == (0.8, 0.8, 0.3, 0.3)
    assert cascade.seconds(4, 1) == pytest.approx(2.0)
    assert cascade.acceptance(1) == (0.8,)
    assert cascade.seconds(1, 1) == pytest.approx(1.0)
    step = step_of(cascade, 9, 1, free)
    assert step.num_drafted == 5  # no more than the parts have
    assert step.tokens == pytest.approx(1 + 0.8 + 0.64 + 0.64 * (0.3 + 0.09 + 0.027))


@given(
    st.lists(st.floats(0, 1), max_size=4),
    st.integers(0, 12),
    st.integers(1, 9),
)
def test_rounds_stay_within_their_bounds(rates: list[float], wanted: int, batch: int) -> None:
    counts = review_rounds(tuple(rates), wanted, batch)
    assert len(counts) == len(rates) + 1
    total = sum(counts)
    assert total <= wanted + 1e-9
    assert total >= wanted / (len(rates) + 1) - 1e-9
    assert total <= sum(review_rounds(tuple(rates), wanted, batch + 1)) + 1e-9
