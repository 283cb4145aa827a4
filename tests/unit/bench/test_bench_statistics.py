# SPDX-License-Identifier: Apache-2.0
"""Figures from runs, against values worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spec_ext.bench import statistics
from vllm_spec_ext.bench.records import (
    EngineCounters,
    EngineRun,
    QuestionRecord,
    Run,
    TurnRecord,
    join_runs,
)


def question(
    index: int, steps: tuple[int, ...], wall_s: float, *, category: str = "a", first_token: int = 0
) -> QuestionRecord:
    tokens = tuple(range(first_token, first_token + sum(steps)))
    gaps = (wall_s / 4, *[0.75 * wall_s / max(len(steps) - 1, 1)] * (len(steps) - 1))
    turn = TurnRecord(3, tokens, steps, wall_s / 4, wall_s, gaps)
    return QuestionRecord(index, category, (turn,))


def engine_run(
    *questions: QuestionRecord,
    wall_s: float = 10.0,
    counters: EngineCounters | None = None,
    propose_us: tuple[float, ...] | None = None,
) -> EngineRun:
    return EngineRun(questions, wall_s, counters or EngineCounters(), propose_us, 2**20)


def test_tokens_per_step_is_a_micro_mean_with_and_without_the_prefill_step() -> None:
    records = [question(0, (1, 3, 2), 1.0), question(1, (1, 1), 1.0)]
    assert statistics.tokens_per_step(records, prefill=False) == pytest.approx(6 / 3)
    assert statistics.tokens_per_step(records, prefill=True) == pytest.approx(8 / 5)
    assert math.isnan(statistics.tokens_per_step([question(0, (1,), 1.0)], prefill=False))


def test_speed_is_a_mean_over_questions_at_batch_one_and_a_total_otherwise() -> None:
    run = engine_run(question(0, (1, 9), 1.0), question(1, (1, 9), 4.0), wall_s=4.0)
    assert statistics.tokens_per_second(run, 1) == pytest.approx((10 / 1 + 10 / 4) / 2)
    assert statistics.tokens_per_second(run, 2) == pytest.approx(20 / 4)
    assert statistics.seconds_per_token(run) == pytest.approx((0.75 / 9 + 3 / 9) / 2)
    assert statistics.seconds_per_token(engine_run(question(0, (1,), 1.0))) == 0.0


def test_decoding_time_leaves_out_the_prefills_of_others() -> None:
    turn = TurnRecord(3, (1, 2, 3, 4, 5), (1, 1, 1, 2), 1.0, 13.0, (1.0, 1.0, 10.0, 1.0), (2,))
    one_token = question(1, (1,), 1.0)
    run = Run("x", 8, 0, engine_run(QuestionRecord(0, "a", (turn,)), one_token))
    (summary,) = statistics.summarise([run], None)
    assert summary.token_ms.median == pytest.approx(2000 / 3)
    # Its user waits for them all the same.
    assert (summary.gap_p50_ms, summary.gap_p99_ms) == (1000.0, 10000.0)
    assert summary.decode_speed_up is None
    # A question that only one of both has decoding steps of is left out of the ratio.
    plain = Run("plain", 8, 0, engine_run(question(0, (1, 1, 1), 4.0), question(1, (1, 1), 400.0)))
    found = statistics.summarise([plain, run], "plain")[1].decode_speed_up
    assert found is not None
    assert found.median == pytest.approx(1.5 / (2 / 3))
    plain = Run("plain", 8, 0, engine_run(one_token))
    assert statistics.summarise([plain], "plain")[0].decode_speed_up is None


@pytest.mark.parametrize(
    ("expected", "found", "first"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1], [1, 2], 1),
        ([], [], None),
        ([], [5], 0),
    ],
)
def test_compare_sees_lengths_too(expected: list[int], found: list[int], first: int | None) -> None:
    assert statistics.compare(expected, found) == first


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_percentile_is_the_smallest_value_that_covers_the_share(
    values: list[float], share: float
) -> None:
    found = statistics.percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    smaller = [value for value in values if value < found]
    assert len(smaller) < share * len(values) + 1e-9


def test_counters_subtract_and_add() -> None:
    early = EngineCounters(1, 5, 2, (1, 1, 0), num_preemptions=1)
    late = EngineCounters(3, 15, 6, (3, 2, 1), num_preemptions=4)
    assert late - early == EngineCounters(2, 10, 4, (2, 1, 1), num_preemptions=3)
    assert late - EngineCounters() == late
    more = EngineCounters(1, 1, 1, (1,), num_preemptions=1)
    assert early + more == EngineCounters(2, 6, 3, (2, 1, 0), num_preemptions=2)


def test_joined_runs() -> None:
    one = engine_run(question(0, (1,), 1.0), propose_us=(1.0,), counters=EngineCounters(1, 2, 1))
    two = engine_run(question(1, (1,), 1.0), propose_us=(2.0,), counters=EngineCounters(1, 2, 0))
    both = join_runs([one, two])
    assert [record.index for record in both.questions] == [0, 1]
    assert (both.wall_s, both.propose_us) == (20.0, (1.0, 2.0))
    assert both.counters == EngineCounters(2, 4, 1)
    assert join_runs([engine_run(question(0, (1,), 1.0))]).propose_us is None


def test_a_speed_up_compares_within_one_repeat() -> None:
    runs = [
        Run("plain", 1, 0, engine_run(question(0, (1, 1), 1.0))),
        Run("fast", 1, 0, engine_run(question(0, (1, 1), 0.5))),
        Run("plain", 1, 1, engine_run(question(0, (1, 1), 10.0))),  # a disturbed repeat
        Run("fast", 1, 1, engine_run(question(0, (1, 1), 2.5))),
    ]
    plain, fast = statistics.summarise(runs, "plain")
    assert plain.speed_up == statistics.Spread(1.0, 1.0, 1.0)
    assert fast.speed_up is not None
    assert (fast.speed_up.low, fast.speed_up.high) == (pytest.approx(2.0), pytest.approx(4.0))
    assert fast.speed_up.median == pytest.approx(3.0)
    assert fast.speed_up_by_category == {"a": pytest.approx(3.0)}


def test_divergences_are_counted_against_plain_and_plain_against_itself() -> None:
    same, other = question(0, (1, 2), 1.0), question(0, (1, 2), 1.0, first_token=7)
    shorter = question(1, (1, 1), 1.0)
    longer = question(1, (1, 2), 1.0)
    runs = [
        Run("plain", 1, 0, engine_run(same, longer)),
        Run("plain", 1, 1, engine_run(other, longer)),
        Run("fast", 1, 0, engine_run(same, shorter)),
        Run("fast", 1, 1, engine_run(other, longer)),
    ]
    plain, fast = statistics.summarise(runs, "plain")
    assert (plain.num_identical, plain.num_compared) == (3, 4)
    assert (fast.num_identical, fast.num_compared) == (3, 4)
    assert fast.divergences == [statistics.Divergence(0, 1, 3, 2, 2)]


def test_acceptance_and_drafter_times() -> None:
    counters = EngineCounters(4, 16, 6, (4, 2, 0, 0))
    run = engine_run(question(0, (1, 2), 1.0), counters=counters, propose_us=(1.0, 3.0, 100.0))
    (summary,) = statistics.summarise([Run("x", 8, 0, run)], None)
    assert summary.acceptance_per_position == [1.0, 0.5, 0.0, 0.0]
    assert summary.draft_length == 4.0
    assert summary.acceptance_rate == pytest.approx(6 / 16)
    assert (summary.propose_p50_us, summary.propose_p99_us) == (3.0, 100.0)
    assert summary.speed_up is None
    assert summary.num_compared == 0


def test_the_slowest_stretch_of_a_category_is_not_made_up_for_by_others() -> None:
    plain = [question(i, (1, 1, 1), 4.0, category=c) for i, c in enumerate(["a", "b > x", "b > y"])]
    again = [question(0, (1, 1, 1), 2.0), *plain[1:]]
    slower = [
        question(0, (1, 2), 1.0),
        question(1, (1, 1, 1), 5.0, category="b > x"),
        question(2, (1, 1, 1), 4.0, category="b > y", first_token=9),  # another text
    ]
    runs = [
        Run("plain", 2, 0, engine_run(*plain)),
        Run("slower", 2, 0, engine_run(*slower)),
        Run("plain", 2, 1, engine_run(*again)),
        Run("slower", 2, 1, engine_run(*slower)),
    ]
    summaries = statistics.summarise(runs, "plain")
    assert summaries[0].slowest_by_category is None
    # In the second repeat plain decoding was twice as fast in one of them.
    expected = {"a": 2.0, "b": 0.8, "b > x": 0.8}
    assert summaries[1].slowest_by_category == pytest.approx(expected)
    assert statistics.summarise(runs[1:2], None)[0].slowest_by_category is None


def test_categories_are_kept_apart() -> None:
    run = engine_run(question(0, (1, 4), 1.0), question(1, (1, 1), 1.0, category="b"))
    (summary,) = statistics.summarise([Run("x", 1, 0, run)], "x")
    assert summary.tokens_per_step_by_category == {"a": 4.0, "b": 1.0}
