# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of draft trees, against walks up and down the tree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spec_ext.proposers.base import Draft, chain
from vllm_spec_ext.proposers.draft_tree import (
    agreeing_path,
    chain_parents,
    is_branching,
    is_path,
    node_depths,
    parents_of,
    tree_problem,
)
from vllm_spec_ext.scorers.walk import tree as batched


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 10) -> list[int]:
    """Parents of a random tree."""
    size = draw(st.integers(0, max_nodes))
    return [draw(st.integers(-1, node - 1)) for node in range(size)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from below the root down to this one."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@given(trees())
def test_depths_are_the_lengths_of_paths(parents: list[int]) -> None:
    depths = node_depths(parents)
    assert depths == [len(path_to(parents, node)) - 1 for node in range(len(parents))]
    assert tree_problem(parents, len(parents)) is None


@given(st.lists(trees(), min_size=1, max_size=4))
def test_the_compiled_depths_of_a_batch_are_the_same(batch: list[list[int]]) -> None:
    starts = np.cumsum([0, *map(len, batch)])
    flat = np.array([parent for parents in batch for parent in parents], np.int64)
    expected = [depth for parents in batch for depth in node_depths(parents)]
    assert batched.node_depths(flat, starts).tolist() == expected


@given(trees())
def test_a_chain_is_what_has_one_path(parents: list[int]) -> None:
    is_chain = all(path_to(parents, node) == list(range(node + 1)) for node in range(len(parents)))
    assert is_branching(parents) == (not is_chain)
    assert (parents == chain_parents(len(parents))) == is_chain


@given(trees(), st.lists(st.integers(-1, 10), max_size=5))
def test_paths_lead_down_from_the_root(parents: list[int], nodes: list[int]) -> None:
    for node in range(len(parents)):
        assert is_path(path_to(parents, node), parents)
    paths = [[], *(path_to(parents, node) for node in range(len(parents)))]
    assert is_path(nodes, parents) == (nodes in paths)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Tokens and parents of a tree whose siblings differ, and what a target says."""
    parents = draw(trees())
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        siblings = {tokens[other] for other in range(node) if parents[other] == parent}
        free = [token for token in range(11) if token not in siblings]
        tokens.append(draw(st.sampled_from(free)))
    wanted = draw(st.lists(st.integers(0, 10), max_size=6))
    target = draw(st.integers(-1, len(parents) - 1))
    if target >= 0:  # else a long agreement would be rare
        followed = path_to(parents, target)
        wanted = [tokens[node] for node in followed] + wanted
    return tokens, parents, wanted


@given(drafts())
def test_the_agreeing_path_is_the_longest(
    draft: tuple[list[int], list[int], list[int]],
) -> None:
    tokens, parents, wanted = draft
    paths = [path_to(parents, node) for node in range(len(parents))]
    agreeing = [path for path in paths if [tokens[node] for node in path] == wanted[: len(path)]]
    found = agreeing_path(tokens, parents, wanted)
    assert list(found) == max(agreeing, key=len, default=[])
    assert is_path(found, parents)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((5, 6, 7, 1), (0, 1, 2)),
        ((5, 8, 7), (0, 3)),
        ((9, 6), (4,)),
        ((1,), ()),
        ((5,), (0,)),
        ((), ()),
    ],
)
def test_agreeing_paths_of_one_tree(wanted: tuple[int, ...], expected: tuple[int, ...]) -> None:
    parents = [-1, 0, 1, 0, -1]
    assert agreeing_path([5, 6, 7, 8, 9], parents, wanted) == expected
    assert node_depths(parents) == [0, 1, 2, 1, 0]


def test_a_draft_without_parents_is_a_chain() -> None:
    assert parents_of(chain([5, 6, 7])) == [-1, 0, 1]
    assert parents_of(chain([])) == []
    assert agreeing_path([5, 6, 7], parents_of(chain([5, 6, 7])), (5, 6, 1)) == (0, 1)
    tree = Draft(np.array([5, 6], np.int32), np.array([-1, -1], np.int32))
    assert parents_of(tree) == [-1, -1]


@pytest.mark.parametrize(
    ("parents", "num_nodes", "problem"),
    [
        ([-1, 0], 3, "found 2 parents, expected one for each of 3 nodes"),
        ([0], 1, "node 0: found parent 0, expected -1 to -1"),
        ([-1, 2, 0], 3, "node 1: found parent 2, expected -1 to 0"),
        ([-1, -2], 2, "node 1: found parent -2, expected -1 to 0"),
    ],
)
def test_what_is_no_tree(parents: list[int], num_nodes: int, problem: str) -> None:
    assert tree_problem(parents, num_nodes) == problem
