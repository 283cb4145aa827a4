# SPDX-License-Identifier: Apache-2.0
"""The best draft tree, against brute force over all trees of paths."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_spec_ext.proposers.blockwise.tree import best_tree


def random_log_probs(seed: int, num_heads: int, candidates: int) -> NDArray[np.float32]:
    """Rows of descending log-probabilities."""
    random = np.random.default_rng(seed)
    probs = random.dirichlet(np.full(candidates + 1, 0.6), size=num_heads)[:, :candidates]
    return np.log(np.sort(probs, axis=1)[:, ::-1] + 1e-9).astype(np.float32)


def path_scores(log_probs: NDArray[np.float32]) -> list[float]:
    """Joint log-probability of every path, of every length, best first."""
    num_heads, candidates = log_probs.shape
    scores = []
    for depth in range(1, num_heads + 1):
        for ranks in itertools.product(range(candidates), repeat=depth):
            scores.append(float(sum(float(log_probs[i, r]) for i, r in enumerate(ranks))))
    return sorted(scores, reverse=True)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_heads=st.integers(1, 4),
    candidates=st.integers(1, 4),
    budget=st.integers(0, 40),
)
def test_tree_is_the_best_and_in_order(
    seed: int, num_heads: int, candidates: int, budget: int
) -> None:
    log_probs = random_log_probs(seed, num_heads, candidates)
    depths, ranks, parents = best_tree(log_probs, budget, -math.inf)
    everything = path_scores(log_probs)
    assert len(depths) == min(budget, len(everything))
    scores: list[float] = []
    children: dict[int, list[int]] = {}
    for node, (depth, rank, parent) in enumerate(zip(depths, ranks, parents, strict=True)):
        assert -1 <= parent < node
        assert depth == (0 if parent == -1 else depths[parent] + 1)
        above = 0.0 if parent == -1 else scores[parent]
        scores.append(above + float(log_probs[depth, rank]))
        children.setdefault(int(parent), []).append(int(rank))
    # Siblings are all different and the likeliest comes first, so the first path is the best one.
    assert all(ranks == list(range(len(ranks))) for ranks in children.values())
    expected = sum(math.exp(score) for score in everything[:budget])
    assert sum(math.exp(score) for score in scores) == pytest.approx(expected, rel=1e-5)


def test_depth_first_pre_order() -> None:
    log_probs = np.log(np.array([[0.5, 0.4], [0.5, 0.4]], np.float32))
    depths, ranks, parents = best_tree(log_probs, 6, -math.inf)
    assert depths.tolist() == [0, 1, 1, 0, 1, 1]
    assert ranks.tolist() == [0, 0, 1, 1, 0, 1]
    assert parents.tolist() == [-1, 0, 0, -1, 3, 3]


def test_unlikely_paths_are_left_out() -> None:
    log_probs = np.log(np.array([[0.5, 0.3], [0.5, 0.2]], np.float32))
    depths, ranks, _ = best_tree(log_probs, 6, math.log(0.2))
    assert list(zip(depths.tolist(), ranks.tolist(), strict=True)) == [(0, 0), (1, 0), (0, 1)]
    assert not len(best_tree(log_probs, 6, math.log(0.6))[0])


def test_ties_are_deterministic_and_impossible_tokens_never_drafted() -> None:
    flat = np.full((2, 3), math.log(1 / 3), np.float32)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(best_tree(flat, 5, -9.0), best_tree(flat, 5, -9.0), strict=True)
    )
    impossible = np.array([[0.0, -np.inf], [-np.inf, -np.inf]], np.float32)
    assert best_tree(impossible, 5, -math.inf)[0].tolist() == [0]
