# SPDX-License-Identifier: Apache-2.0
"""Expected gains, against steps and costs whose right answer is plain to see."""

from typing import Any

import pytest

from vllm_spec_ext.bench.planner import (
    RecordedStep,
    Recording,
    StepTimes,
    acceptance_per_position,
    acceptance_rate,
    best,
    drafting_cost,
    plan_for,
    plans,
    ranges,
    read_recording,
    textbook,
    typical_speed_up,
)

FREE = StepTimes({1: {0: 1.0, 64: 1.0}})
DEAR = StepTimes({1: {0: 1.0, 8: 1.8}, 8: {0: 1.0, 8: 9.0}})  # 0.1 and 1.0 a node


def steps(*drafts: tuple[int, tuple[int, ...]], first: int = 0) -> tuple[RecordedStep, ...]:
    """One request's steps, each the only one of its engine step."""
    return tuple(
        RecordedStep(first + i, nodes, accepted) for i, (nodes, accepted) in enumerate(drafts)
    )


ALL_OF_EIGHT = (8, tuple(range(8)))
CHAINS = Recording((steps(ALL_OF_EIGHT, (8, ()), (0, ())),), 0.0)


def row(request: str, step: int, parents: list[int], **more: Any) -> dict[str, Any]:
    """As the worker's StepLog writes it."""
    empty: dict[str, Any] = {"accepted": [], "path_probs": [], "new_tokens": [1]}
    tokens = list(range(len(parents)))
    return {**empty, "request_id": request, "step": step, "tokens": tokens, "parents": parents} | (
        more
    )


def test_free_verification_gives_the_tokens_per_step() -> None:
    plan = plan_for(8, {1: CHAINS}, FREE)
    assert plan.tokens_per_step[1] == pytest.approx(11 / 3)
    assert plan.nodes_per_step[1] == pytest.approx(16 / 3)
    assert plan.speed_up == {1: pytest.approx(11 / 3)}


def test_a_cap_cuts_drafts_and_what_was_accepted_of_them() -> None:
    plan = plan_for(2, {1: CHAINS}, DEAR)
    assert plan.tokens_per_step[1] == pytest.approx((3 + 1 + 1) / 3)
    assert plan.nodes_per_step[1] == pytest.approx(4 / 3)
    assert plan.speed_up[1] == pytest.approx((5 / 3) / (1 + 0.1 * 4 / 3))


def test_a_budget_drafts_the_likeliest_nodes_of_a_tree() -> None:
    # Listed depth first: 0-1-2 is one branch, 3 the other root; a budget of 2 drafts 0 and 3.
    tree = row("a", 1, [-1, 0, 1, -1], path_probs=[0.5, 0.1, 0.05, 0.4], accepted=[3])
    found = read_recording([row("a", 0, []), tree], [])
    assert found.branches
    assert found.steps == [RecordedStep(1, 4, (1,))]
    assert plan_for(2, {1: found}, FREE).tokens_per_step[1] == 2
    assert plan_for(1, {1: found}, FREE).tokens_per_step[1] == 1
    # Without probabilities level by level.
    tree = row("a", 1, [-1, 0, 1, -1], accepted=[0, 1])
    found = read_recording([row("a", 0, []), tree], [])
    assert found.steps[0].accepted == (0, 2)
    # A path is cut at its first node that is not drafted.
    assert RecordedStep(0, 4, (0, 3, 1)).tokens(2) == 2


def test_the_first_step_of_each_turn_is_its_prefill() -> None:
    found = read_recording(
        [
            row("0-0", 1, []),
            row("0-0", 2, [-1, 0], accepted=[0]),
            row("0-1", 3, []),
            row("1-0", 3, []),
            row("0-1", 4, [-1], accepted=[0]),
        ],
        [7.0, 100.0, 7.0, 300.0],
    )
    assert found.requests == ((RecordedStep(2, 2, (0,)),), (RecordedStep(4, 1, (0,)),))
    assert found.drafter_s == pytest.approx(200e-6)
    assert not found.branches


def test_steps_of_a_batch_that_is_not_full_are_left_out() -> None:
    rows = [row(name, 1, []) for name in "ab"]
    rows += [row("a", 2, [-1], accepted=[0]), row("b", 2, [])]
    rows += [row("a", 3, [-1, 0, 1, 2])]  # `adaptive_length` drafts more as soon as it is alone
    found = read_recording(rows, [1.0, 20.0, 1.0])
    assert found.requests == ((RecordedStep(2, 1, (0,)),), (RecordedStep(2, 0, ()),))
    assert found.drafter_s == pytest.approx(20e-6)


def test_nobody_drafts_a_child_before_its_parent() -> None:
    tree = row("a", 1, [-1, 0, -1], path_probs=[0.5, 1.0, 0.6], accepted=[0, 1])
    found = read_recording([row("a", 0, []), tree], [])
    assert found.steps[0].accepted == (1, 2)


def test_the_drafters_time_is_that_of_the_whole_batch() -> None:
    one = Recording((steps((0, ())),), 0.25)
    plan = plan_for(8, {1: one, 8: one}, DEAR)
    assert plan.speed_up == {1: pytest.approx(0.8), 8: pytest.approx(0.8)}


def test_a_step_takes_as_long_as_its_requests_nodes_together() -> None:
    curved = StepTimes({2: {0: 1.0, 4: 1.0, 8: 2.0}})
    batch = Recording((steps(ALL_OF_EIGHT), steps((0, ()))), 0.0)  # one engine step of two
    assert plan_for(8, {2: batch}, curved).seconds_per_token[2] == pytest.approx((1 / 9 + 1) / 2)


def test_requests_count_alike_however_long() -> None:
    free_text = steps(*[(0, ())] * 100)
    copied = steps(*[(4, (0, 1, 2, 3))] * 4, first=100)
    found = Recording((free_text, copied), 0.0)
    assert plan_for(8, {1: found}, FREE).speed_up[1] == pytest.approx(1 / ((1 + 0.2) / 2))


def test_where_speculation_stops_paying() -> None:
    recordings = {1: CHAINS, 8: CHAINS}
    found = plans(recordings, DEAR, 8)
    assert [plan.cap for plan in found] == [1, 2, 3, 4, 6, 8]
    assert best(found, 1, DEAR).cap == 8
    assert max(plan.speed_up[8] for plan in found) < 1
    # Between the two sizes the step's price is interpolated: 1.0 + 0.1 (1 + 9 (b - 1) / 7) v.
    schedule = ranges(found, DEAR)
    assert schedule[0][0] == 1
    assert schedule[0][2] == 8
    assert schedule[-1][1:] == (8, 0)
    assert [last + 1 for _, last, _ in schedule[:-1]] == [first for first, _, _ in schedule[1:]]
    stops = schedule[-1][0]
    expected = {b: 1 + 16 / 3 * 0.1 * (1 + 9 * (b - 1) / 7) for b in range(1, 9)}
    assert stops == min(b for b in expected if expected[b] > 11 / 3)
    assert ranges(plans({1: CHAINS}, FREE, 8), FREE) == [(1, 1, 8)]
    later = StepTimes({4: DEAR.table[1], 8: DEAR.table[8]})
    found = plans({4: CHAINS, 8: CHAINS}, later, 8)
    assert ranges(found, later)[0][0] == 1


def test_acceptance_rate_is_the_textbooks_alpha() -> None:
    assert acceptance_rate(CHAINS.steps) == pytest.approx(8 / 9)
    assert acceptance_rate(steps((0, ()))) == 0.0
    assert acceptance_per_position(steps((4, (0, 1)), (4, (0,)), (0, ()))) == [1.0, 0.5]


def test_textbook_figure() -> None:
    # One token in two stands; a drafter that takes half a step for a draft of two.
    found = Recording((steps((2, (0,))),), 0.5)
    assert acceptance_rate(found.steps) == 0.5
    assert drafting_cost(found, 1.0) == pytest.approx(0.25)
    assert textbook(0.5, 0.0, 2) == pytest.approx(1 + 0.5 + 0.25)
    assert plan_for(2, {1: found}, FREE).textbook == pytest.approx(1.75 / 1.5)
    assert textbook(1.0, 0.0, 2) == pytest.approx(3)
    assert drafting_cost(Recording((steps((0, ())),), 0.5), 1.0) == 0.0
    assert typical_speed_up([2.0, 0.5]) == pytest.approx(1.0)
