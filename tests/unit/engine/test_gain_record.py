# SPDX-License-Identifier: Apache-2.0
"""What drafts earned: a short memory, and a long one that tells bad luck from other text."""

import random

import pytest

from vllm_spec_ext.engine.drafting.gain_record import GainRecord


def record_of(gains: list[float]) -> GainRecord:
    record = GainRecord()
    for gain in gains:
        record.add(gain, 0.1)
    return record


def half_wrong(num_steps: int, seed: int = 0) -> list[float]:
    """Half of the drafts lose a quarter of a step; the others save one step and a quarter."""
    draws = random.Random(seed)
    return [-0.25 if draws.random() < 0.5 else 1.0 for _ in range(num_steps)]


def test_nothing_is_sure_after_a_few_steps() -> None:
    assert record_of([1.0] * 7).lasting == 0.0
    assert record_of([1.0] * 20).lasting > 0.5


@pytest.mark.parametrize("seed", range(4))
def test_failures_in_a_row_as_usual_leave_it_sure(seed: int) -> None:
    record = record_of([*half_wrong(200, seed), 1.0, -0.25, -0.25, -0.25])
    assert record.lasting > 0.15
    assert record.lately < 0.4


def test_more_failures_than_usual_are_other_text() -> None:
    usual = [*half_wrong(200), 1.0]
    few, many = record_of([*usual, *[-0.25] * 3]), record_of([*usual, *[-0.25] * 8])
    assert many.lasting < 0.2 * few.lasting
    back = record_of([*usual, *[-0.25] * 8, 1.0])
    assert back.lasting > 4 * many.lasting


def test_of_drafts_that_hardly_ever_fail_two_failures_are_enough() -> None:
    always = [3.0] * 100
    assert record_of([*always, -0.25, -0.25]).lasting < 0.1 * record_of(always).lasting


def test_what_always_fails_earns_nothing() -> None:
    record = record_of([-0.25] * 100)
    assert record.lasting == 0.0
    assert record.lately == pytest.approx(-0.25, abs=0.01)
    assert record.hoped < -0.2  # nothing varies: there is nothing to hope for


def test_there_is_more_to_hope_for_where_gains_vary() -> None:
    steady = record_of([0.05] * 100)
    varied = record_of([-0.3, 0.4] * 50)
    assert steady.hoped - steady.lately < 0.01
    assert varied.hoped - varied.lately > 0.03
