# SPDX-License-Identifier: Apache-2.0
"""Intervals of means over few texts hold what they promise."""

import math
import random
import statistics

import pytest

from vllm_spec_ext.bench.mean_of_texts import MeanOfTexts


def test_by_hand() -> None:
    found = MeanOfTexts.of([0.8, 0.9, 1.0, 0.7])
    assert found.mean == pytest.approx(0.85)
    assert found.margin == pytest.approx(3.182 * 0.12909944 / 2)  # 3 degrees of freedom
    assert str(found) == "0.850 +- 0.205 (4 texts)"


def test_one_text_says_nothing_of_others() -> None:
    assert MeanOfTexts.of([0.5]) == MeanOfTexts(0.5, math.inf, 1)


def test_more_texts_than_the_table_has() -> None:
    values = [float(i % 2) for i in range(100)]
    error = statistics.stdev(values) / 10
    assert 1.98 * error < MeanOfTexts.of(values).margin < 2.05 * error


@pytest.mark.parametrize("count", [2, 8, 31, 32])
def test_nineteen_of_twenty_intervals_hold_the_truth(count: int) -> None:
    chance = random.Random(count)
    held = 0
    for _ in range(4000):
        found = MeanOfTexts.of([chance.gauss(3.0, 2.0) for _ in range(count)])
        held += abs(found.mean - 3.0) <= found.margin
    assert held / 4000 == pytest.approx(0.95, abs=0.012)
