# SPDX-License-Identifier: Apache-2.0
"""Expected gains, against steps and costs whose right answer is plain to see."""

import pytest

from vllm_spec_ext.bench.planner import (
    RecordedStep,
    StepTimes,
    acceptance_rate,
    best,
    plan_for,
    plans,
    ranges,
    read_steps,
)

FREE = StepTimes({1: {0: 1.0, 64: 1.0}})
DEAR = StepTimes({1: {0: 1.0, 8: 1.8}, 8: {0: 1.0, 8: 9.0}})  # 0.1 and 1.0 a node
CHAINS = [RecordedStep(8, tuple(range(8))), RecordedStep(8, ()), RecordedStep(0, ())]


def test_free_verification_gives_the_tokens_per_step() -> None:
    plan = plan_for(8, CHAINS, FREE, 0.0)
    assert plan.tokens_per_step == pytest.approx(11 / 3)
    assert plan.nodes_per_step == pytest.approx(16 / 3)
    assert plan.speed_up == {1: pytest.approx(11 / 3)}


def test_a_cap_cuts_drafts_and_what_was_accepted_of_them() -> None:
    plan = plan_for(2, CHAINS, DEAR, 0.0)
    assert plan.tokens_per_step == pytest.approx((3 + 1 + 1) / 3)
    assert plan.nodes_per_step == pytest.approx(4 / 3)
    assert plan.speed_up[1] == pytest.approx((5 / 3) / (1 + 0.1 * 4 / 3))


def test_the_cap_of_a_tree_counts_nodes() -> None:
    tree = [RecordedStep(6, (3, 4, 5))]  # the second branch was right
    assert plan_for(6, tree, FREE, 0.0).tokens_per_step == 4
    assert plan_for(4, tree, FREE, 0.0).tokens_per_step == 2
    assert plan_for(3, tree, FREE, 0.0).tokens_per_step == 1


def test_the_drafters_time_counts_for_every_request() -> None:
    steps = [RecordedStep(0, ())]
    assert plan_for(8, steps, DEAR, 0.25).speed_up == {
        1: pytest.approx(1 / 1.25),
        8: pytest.approx(1 / 3.0),
    }


def test_where_speculation_stops_paying() -> None:
    found = plans(CHAINS, DEAR, 0.0, 8)
    assert [plan.cap for plan in found] == [1, 2, 3, 4, 6, 8]
    assert best(found, 1).cap == 8
    assert max(plan.speed_up[8] for plan in found) < 1
    assert ranges(found) == [(1, 7, 8), (8, 8, 0)]
    assert ranges(plans(CHAINS, FREE, 0.0, 8)) == [(1, 1, 8)]


def test_acceptance_rate_is_the_textbooks_alpha() -> None:
    assert acceptance_rate(CHAINS) == pytest.approx(8 / 9)
    assert acceptance_rate([RecordedStep(0, ())]) == 0.0
    steps = [RecordedStep(2, (0,))]  # one token stood, the next did not
    plan = plan_for(2, steps, FREE, 0.0)
    assert plan.textbook == pytest.approx(1 + 0.5 + 0.25)
    assert plan_for(2, steps, FREE, 0.5).textbook == pytest.approx(1.75 / 2)
    assert plan_for(2, [RecordedStep(2, (0, 1))], FREE, 0.0).textbook == pytest.approx(3)


def test_recorded_steps_without_the_prefill() -> None:
    trace = {
        "steps": [
            {"tokens": [], "accepted": [], "new_tokens": [5]},
            {"tokens": [6, 7], "accepted": [0], "new_tokens": [6, 9]},
        ]
    }
    assert read_steps([trace]) == [RecordedStep(2, (0,))]
