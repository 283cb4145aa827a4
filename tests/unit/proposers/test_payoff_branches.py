# SPDX-License-Identifier: Apache-2.0
"""Which branches pay, against trying every part of a tree."""

import itertools

import numpy as np
import pytest

from vllm_spec_ext.proposers.draft_tree import tree_problem
from vllm_spec_ext.proposers.payoff.branches import parents_among, paying_nodes


def random_tree(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Parents, and path probabilities that never rise along a path."""
    parents = np.array([int(rng.integers(-1, node)) if node else -1 for node in range(size)])
    paths = np.empty(size)
    for node, parent in enumerate(parents):
        paths[node] = (paths[parent] if parent >= 0 else 1.0) * rng.uniform(0.05, 1.0)
    return parents.astype(np.int32), paths


def num_branches(parents: list[int]) -> int:
    """Paths of a tree beside the first."""
    inner = set(parents)
    return max(0, sum(node not in inner for node in range(len(parents))) - 1)


def earned(
    parents: np.ndarray, paths: np.ndarray, nodes: list[int], node: float, branch: float
) -> float | None:
    """By definition; None if the nodes are no tree."""
    if any(parents[one] >= 0 and parents[one] not in nodes for one in nodes):
        return None
    places = {-1: -1, **{one: place for place, one in enumerate(nodes)}}
    branches = num_branches([places[int(parents[one])] for one in nodes])
    return sum(paths[one] - node for one in nodes) - branch * branches


@pytest.mark.parametrize("branch_cost", [0.02, 0.15, 0.6])
def test_no_part_of_a_tree_earns_more(branch_cost: float) -> None:
    rng = np.random.default_rng(3)
    cut = 0
    for _ in range(60):
        parents, paths = random_tree(rng, int(rng.integers(1, 9)))
        kept = paying_nodes(parents, paths - 0.1, branch_cost)
        nodes = list(range(len(parents))) if kept is None else kept.tolist()
        cut += kept is not None
        best = max(
            found
            for size in range(len(parents) + 1)
            for some in itertools.combinations(range(len(parents)), size)
            if (found := earned(parents, paths, list(some), 0.1, branch_cost)) is not None
        )
        assert earned(parents, paths, nodes, 0.1, branch_cost) == pytest.approx(best)
        assert (
            tree_problem(parents_among(parents, np.array(nodes, np.int32)).tolist(), len(nodes))
            is None
        )
    assert cut > 20


def test_free_branches_all_stay() -> None:
    parents, paths = random_tree(np.random.default_rng(0), 8)
    assert paying_nodes(parents, paths - 0.1, 0.0) is None


def test_dear_branches_leave_a_chain() -> None:
    parents, paths = np.array([-1, -1, 0, 0, 1], np.int32), np.array([0.6, 0.4, 0.5, 0.1, 0.3])
    kept = paying_nodes(parents, paths - 0.05, 9.0)
    assert kept is not None
    assert kept.tolist() == [0, 2]
    assert parents_among(parents, kept).tolist() == [-1, 0]


def test_the_path_that_earns_most_goes_on() -> None:
    # Two of the right child's descendants earn more than the likelier left child does.
    parents, paths = np.array([-1, -1, 1, 2], np.int32), np.array([0.5, 0.45, 0.44, 0.43])
    kept = paying_nodes(parents, paths - 0.1, 0.5)
    assert kept is not None
    assert kept.tolist() == [1, 2, 3]


def test_nothing_pays() -> None:
    kept = paying_nodes(np.array([-1, 0], np.int32), np.array([-0.1, -0.15]), 0.1)
    assert kept is not None
    assert kept.tolist() == []
