# SPDX-License-Identifier: Apache-2.0
"""What branches cost is told from what nodes cost, and proposers hear of it."""

import random

import pytest

from vllm_spec_ext.engine.drafting.branch_cost import BranchCost
from vllm_spec_ext.engine.drafting.draft_budget import DraftBudget

PLAIN_S = 0.03
TOKEN = 0.05  # plain steps


def run(
    budget: DraftBudget, branch: float, num_steps: int = 1500, seed: int = 0, *, any_: float = 0.0
) -> None:
    """Steps of which half have trees, on a machine of these costs."""
    rng = random.Random(seed)
    for step in range(num_steps):
        nodes = 0 if step < 10 else rng.choice((0, 2, 4, 6))
        branches = rng.choice((0, 1, 2)) if nodes > 2 else 0
        taken = 1 + TOKEN * nodes + branch * branches + any_ * (branches > 0)
        seconds = PLAIN_S * taken * rng.uniform(0.95, 1.05)
        budget.verified(1, nodes, 1 + nodes // 2, seconds, branches)
        budget.allow([8])
        budget.drafted({"method": 0.0001})


@pytest.mark.parametrize(("branch", "error"), [(0.0, 0.02), (0.08, 0.02), (0.2, 0.045)])
def test_branches_and_nodes_are_told_apart(branch: float, error: float) -> None:
    """Estimates lean towards the first guess, which speaks for trying branches again."""
    budget = DraftBudget()
    run(budget, branch)
    assert budget.branches.expected(1) == pytest.approx(branch, abs=error)
    found = budget.costs.estimate(1)
    assert found is not None
    assert found.per_token == pytest.approx(TOKEN, abs=0.015)


def test_steps_with_branches_may_be_dear_as_such() -> None:
    """On a GPU only others get a full CUDA graph; chains are not to blame for it."""
    budget = DraftBudget()
    run(budget, 0.05, 60, any_=2.0)
    soon = budget.branches.extra(2)
    run(budget, 0.05, 600, any_=2.0)
    assert 1.5 < soon < 2.7
    assert budget.branches.extra(1) == pytest.approx(2.05, abs=0.4)
    assert budget.branches.extra(2) == pytest.approx(2.1, abs=0.3)
    found = budget.costs.estimate(1)
    assert found is not None
    assert found.extra(4) == pytest.approx(4 * TOKEN, abs=0.1)


def test_proposers_are_told_in_tokens() -> None:
    dear, free = DraftBudget(), DraftBudget()
    run(dear, 0.2)
    run(free, 0.0)
    costs = [budget.allow([8]).branch_cost for budget in (dear, free)]
    assert costs[0] is not None
    assert costs[1] is not None
    # A token takes less than a plain step where drafts are accepted, so it is more of them.
    assert costs[0] > 0.2
    assert costs[1] < 0.05


def test_what_is_not_tried_is_forgotten() -> None:
    cost = BranchCost()
    first = cost.expected(1)
    for _ in range(50):
        cost.observe(2, 0.8)
    dear = cost.expected(1)
    assert dear > 4 * first
    for _ in range(4000):
        cost.observe(0, 0.0)
    assert cost.expected(1) == pytest.approx(first, rel=0.2)


def test_a_pause_is_no_cost() -> None:
    cost = BranchCost()
    cost.observe(1, 40.0)
    assert cost.expected(1) < 0.1


def test_pauses_are_none_if_they_are_not_in_a_row() -> None:
    cost = BranchCost()
    for _ in range(20):
        cost.observe(1, 40.0)
        cost.observe(1, 40.0)
        cost.observe(1, 0.05)
    assert cost.expected(1) < 0.1
