# SPDX-License-Identifier: Apache-2.0
"""How far lossy answers drift, by hand."""

import pytest

from vllm_spec_ext.bench.drift import drift_of, edit_distance
from vllm_spec_ext.bench.records import EngineCounters, EngineRun, QuestionRecord, Run, TurnRecord


def run_of(name: str, answers: list[tuple[int, ...]]) -> Run:
    records = tuple(
        QuestionRecord(
            i, "any", (TurnRecord(3, tokens, (1,) * len(tokens), 0.1, 1.0, (0.1,) * len(tokens)),)
        )
        for i, tokens in enumerate(answers)
    )
    return Run(name, 1, 0, EngineRun(records, 1.0, EngineCounters(), None, 0))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [((), (), 0), ((1, 2, 3), (1, 2, 3), 0), ((1, 2, 3), (1, 3), 1), ((1, 2), (3, 4, 5), 3)],
)
def test_edit_distance(one: tuple[int, ...], other: tuple[int, ...], expected: int) -> None:
    assert edit_distance(one, other) == expected
    assert edit_distance(other, one) == expected


def test_drift() -> None:
    plain = run_of("plain", [(1, 2, 3, 4), (5, 6)])
    lossy = run_of("lossy", [(1, 2, 9, 4), (5, 6)])
    drift = drift_of(lossy, plain, [-4.0, -2.0], [-2.0, -1.0])
    assert drift.share_identical == 0.5
    assert drift.edit_distance == pytest.approx(0.125)
    assert drift.log_prob == pytest.approx(-1.0)
    assert drift.plain_log_prob == pytest.approx(-0.5)
