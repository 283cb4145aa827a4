# SPDX-License-Identifier: Apache-2.0
"""The best draft over a trellis of candidates, against brute force over all its paths."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_spec_ext.proposers.blockwise.tree import best_tree as tree_of_independent_slots
from vllm_spec_ext.proposers.nar.tree import best_chain, best_tree


def random_trellis(seed: int, slots: int, before: int, candidates: int) -> NDArray[np.float32]:
    """[slots, before, candidates] log-probabilities, in no order; the first slot's rows agree."""
    random = np.random.default_rng(seed)
    probs = random.dirichlet(np.full(candidates + 1, 0.6), size=(slots, before))[..., :candidates]
    probs[0] = probs[0, 0]
    return np.log(probs + 1e-9).astype(np.float32)


def path_scores(log_probs: NDArray[np.float32]) -> list[float]:
    """Joint log-probability of every path, of every length, best first."""
    slots, before, candidates = log_probs.shape
    scores = []
    for depth in range(1, slots + 1):
        for places in itertools.product(range(candidates), repeat=depth):
            rows = (0, *places) if before > 1 else [0] * depth
            scores.append(
                sum(float(log_probs[i, rows[i], place]) for i, place in enumerate(places))
            )
    return sorted(scores, reverse=True)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(1, 4),
    candidates=st.integers(1, 4),
    depends=st.booleans(),
    budget=st.integers(0, 40),
)
def test_tree_is_the_best_and_in_order(
    seed: int, slots: int, candidates: int, depends: bool, budget: int
) -> None:
    log_probs = random_trellis(seed, slots, candidates if depends else 1, candidates)
    found, places, parents, paths = best_tree(log_probs, budget, -math.inf)
    everything = path_scores(log_probs)
    assert len(found) == min(budget, len(everything))
    children: dict[int, list[int]] = {}
    for node, (slot, place, parent) in enumerate(zip(found, places, parents, strict=True)):
        assert -1 <= parent < node
        assert slot == (0 if parent == -1 else found[parent] + 1)
        row = places[parent] if depends and parent >= 0 else 0
        above = 0.0 if parent == -1 else float(paths[parent])
        assert float(paths[node]) == pytest.approx(above + float(log_probs[slot, row, place]))
        children.setdefault(int(parent), []).append(node)
    for nodes in children.values():  # siblings are different and the likeliest comes first
        assert len({int(places[node]) for node in nodes}) == len(nodes)
        assert [float(paths[node]) for node in nodes] == sorted(
            (float(paths[node]) for node in nodes), reverse=True
        )
    expected = sum(math.exp(score) for score in everything[:budget])
    assert np.exp(paths.astype(float)).sum() == pytest.approx(expected, rel=1e-5)


def test_without_dependence_it_is_the_tree_of_independent_slots() -> None:
    log_probs = random_trellis(3, 4, 1, 5)
    log_probs = -np.sort(-log_probs, axis=-1)
    theirs = tree_of_independent_slots(np.ascontiguousarray(log_probs[:, 0]), 20, -3.0)
    ours = best_tree(log_probs, 20, -3.0)
    for own, other in zip(ours, theirs, strict=False):
        assert own.tolist() == other.tolist()


def test_nodes_below_the_limit_are_left_out() -> None:
    log_probs = random_trellis(5, 3, 3, 3)
    limit = math.log(0.05)
    *_, paths = best_tree(log_probs, 1000, limit)
    above = [score for score in path_scores(log_probs) if score >= limit]
    assert len(paths) == len(above)
    assert len(best_tree(log_probs, 1000, 0.5)[0]) == 0
    assert len(best_tree(np.full((2, 1, 2), -np.inf, np.float32), 9, -math.inf)[0]) == 0


@pytest.mark.parametrize("before", [1, 4])
def test_chain_is_the_greedy_walk(before: int) -> None:
    log_probs = random_trellis(7, 5, before, 4)
    places, paths = best_chain(log_probs)
    row = path = 0.0
    for slot in range(5):
        scores = log_probs[slot, int(row) if before > 1 else 0]
        assert places[slot] == scores.argmax()
        path += float(scores.max())
        assert float(paths[slot]) == pytest.approx(path)
        row = float(places[slot])
