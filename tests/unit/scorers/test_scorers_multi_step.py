# SPDX-License-Identifier: Apache-2.0
"""Multi-step speculative sampling: output distribution by chi-square, refusals, merging."""

import numpy as np
import pytest
import torch

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.scorers.walk.multi_step import Drawn, draw_uniforms, merge_duplicates, multi_step
from vllm_spec_ext.scorers.walk.tree import walk_samples

VOCAB = 4
NUM_RUNS = 60_000
DISTRIBUTIONS = {
    "near": ([0.4, 0.3, 0.2, 0.1], [0.35, 0.35, 0.2, 0.1]),
    "far": ([0.05, 0.05, 0.1, 0.8], [0.7, 0.2, 0.05, 0.05]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.1, 0.3, 0.6]),
    "peaked": ([1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
    "equal": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
}


def fits(counts: np.ndarray, distribution: np.ndarray) -> bool:
    """Chi-square at a level of about 1e-6 (Wilson-Hilferty), nothing where it is 0."""
    possible = distribution > 0
    expected = distribution[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    dof = max(int(possible.sum()) - 1, 1)
    spread = 2 / (9 * dof)
    return not counts[~possible].any() and statistic < dof * (1 - spread + 4.75 * spread**0.5) ** 3


def draw(q: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One token a row; q [n, vocab]."""
    cumulative = q.cumsum(1) / q.sum(1, keepdims=True)
    return (rng.random((len(q), 1)) >= cumulative).sum(1).clip(max=q.shape[1] - 1)


def draw_siblings(q: np.ndarray, drawn: str, num: int, rng: np.random.Generator) -> np.ndarray:
    """[runs, num] tokens under one parent."""
    if drawn == "top":
        return np.tile(np.argsort(-q, kind="stable")[:num], (NUM_RUNS, 1))
    left = np.tile(q, (NUM_RUNS, 1))
    columns = []
    for _ in range(num):
        columns.append(draw(left, rng))
        if drawn == "without_replacement":
            left[np.arange(NUM_RUNS), columns[-1]] = 0.0
    return np.stack(columns, axis=1)


def first_token_counts(
    p: list[float], q: list[float], how: str, declared: Drawn, num: int = 3
) -> np.ndarray:
    """Counts of the first emitted token when ``num`` siblings stand under the root."""
    rng = np.random.default_rng(3)
    distribution = np.array(q)
    tokens = draw_siblings(distribution, how, num, rng)
    starts = np.arange(NUM_RUNS + 1) * num
    found = multi_step(
        np.tile(p, (NUM_RUNS * (num + 1), 1)),
        np.full(NUM_RUNS * num, -1),
        tokens.ravel(),
        starts,
        None if declared == "one_hot" else np.tile(distribution, (NUM_RUNS * num, 1)),
        uniforms=draw_uniforms(starts, torch.Generator().manual_seed(5)),
        drawn=declared,
    )
    return np.bincount(found.emitted[:, 0], minlength=VOCAB)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("drawn", ["iid", "without_replacement", "one_hot"])
def test_first_token_follows_the_target(name: str, drawn: Drawn) -> None:
    p, q = DISTRIBUTIONS[name]
    how = "top" if drawn == "one_hot" else drawn
    assert fits(first_token_counts(p, q, how, drawn), np.array(p))


@pytest.mark.parametrize(
    ("how", "declared"),
    [("top", "iid"), ("top", "without_replacement"), ("without_replacement", "iid")],
)
def test_biased_combinations_fail_the_same_check(how: str, declared: Drawn) -> None:
    """Chosen children with the model's q, and q not renormalised: the bias is real and seen."""
    p, q = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]
    counts = first_token_counts(p, q, how, declared, num=2)
    assert not fits(counts, np.array(p))
    assert 0.5 * np.abs(counts / NUM_RUNS - p).sum() > 0.02


def test_two_levels_and_two_drafters_follow_the_target() -> None:
    """Joint distribution of two tokens; siblings of two drafters, same-token draws merged."""
    rng = np.random.default_rng(11)
    root = np.array([0.1, 0.5, 0.3, 0.1])
    after = rng.dirichlet(np.ones(VOCAB), VOCAB)  # target distribution after each first token
    first_q = rng.dirichlet(np.ones(VOCAB), 2)  # each drafter's distribution at the root
    after_q = rng.dirichlet(np.ones(VOCAB), (2, VOCAB))
    runs = 40_000
    tops = np.stack([draw(np.tile(first_q[s], (runs, 1)), rng) for s in range(2)], axis=1)
    leaves = np.stack([draw(after_q[s][tops[:, s]], rng) for s in range(2)], axis=1)
    parents, tokens, rows, q, draw_nodes, sizes = [], [], [], [], [], []
    for (a, b), (c, d) in zip(tops, leaves, strict=True):
        up, words, nodes = merge_duplicates(np.array([-1, 0, -1, 2]), np.array([a, c, b, d]))
        depth_one = up >= 0
        rows.append(root)
        rows.extend(np.where(depth_one[:, None], 0.25, after[words]))
        parents.append(up)
        tokens.append(words)
        draw_nodes.append(nodes)
        sizes.append(len(words))
        q.extend([first_q[0], after_q[0][a], first_q[1], after_q[1][b]])
    assert {2, 3, 4} == set(sizes)  # tokens of both drafters were merged in some runs
    starts = np.concatenate([[0], np.cumsum(sizes)])
    draw_starts = np.arange(runs + 1) * 4
    found = multi_step(
        np.array(rows),
        np.concatenate(parents),
        np.concatenate(tokens),
        starts,
        np.array(q),
        uniforms=draw_uniforms(draw_starts, torch.Generator().manual_seed(1)),
        drawn="iid",
        draw_nodes=np.concatenate(draw_nodes),
        draw_starts=draw_starts,
    )
    second = np.where(
        found.emitted[:, 1] >= 0, found.emitted[:, 1], draw(after[found.emitted[:, 0]], rng)
    )
    counts = np.bincount(found.emitted[:, 0] * VOCAB + second, minlength=VOCAB * VOCAB)
    assert fits(counts, (root[:, None] * after).ravel())


def test_losing_one_of_two_drafts_of_a_token_is_biased() -> None:
    """Two drafters, one token: keeping the node but only the first q fails the check."""
    p = np.array([0.1, 0.2, 0.3, 0.4])
    distributions = np.array([[0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]])
    rng = np.random.default_rng(2)
    tokens = np.stack(
        [draw(np.tile(distribution, (NUM_RUNS, 1)), rng) for distribution in distributions], axis=1
    )
    for right in (True, False):
        q = np.tile(distributions if right else distributions[[0, 0]], (NUM_RUNS, 1))
        starts = np.arange(NUM_RUNS + 1) * 2
        found = multi_step(
            np.tile(p, (NUM_RUNS * 3, 1)),
            np.full(NUM_RUNS * 2, -1),
            tokens.ravel(),
            starts,
            q,
            uniforms=draw_uniforms(starts, torch.Generator().manual_seed(4)),
            drawn="iid",
        )
        assert fits(np.bincount(found.emitted[:, 0], minlength=VOCAB), p) == right


def test_one_hot_target_is_the_greedy_walk() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        n = int(rng.integers(1, 9))
        parents = np.array([rng.integers(-1, i) for i in range(n)])
        tokens, choice = rng.integers(0, VOCAB, n), rng.integers(0, VOCAB, n + 1)
        starts = np.array([0, n])
        q = np.full((n, VOCAB), 1 / VOCAB)
        found = multi_step(
            np.eye(VOCAB)[choice],
            parents,
            tokens,
            starts,
            q,
            uniforms=draw_uniforms(starts),
            drawn="iid",
        )
        expected = walk_samples(parents, tokens, starts, choice)
        assert found.emitted.tolist() == expected.emitted.tolist()
        assert found.accepted.tolist() == expected.accepted.tolist()


def test_merge_keeps_every_draw() -> None:
    parents, tokens, nodes = merge_duplicates(
        np.array([-1, 0, -1, 2, 2, -1]), np.array([7, 8, 7, 8, 9, 5])
    )
    assert parents.tolist() == [-1, 0, 0, -1]
    assert tokens.tolist() == [7, 8, 9, 5]
    assert nodes.tolist() == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "q", "drawn", "text"),
    [
        ([0, 1], [[0.5, 0.5], [0.5, 0.5]], "one_hot", "not one-hot"),
        ([0, 1], None, "iid", "needs q"),
        ([0, 1], [[0.0, 1.0], [0.5, 0.5]], "iid", "probability 0"),
        ([0, 0], [[0.5, 0.5], [0.5, 0.5]], "without_replacement", "repeats"),
        ([0, 0], None, "one_hot", "repeats"),
        ([0, 1], [[3.0, 1.0], [2.0, 5.0]], "iid", "not logits"),
        ([0, 1], [[0.5, 0.5]], "iid", "2 .one a draw"),
        ([0, 1], None, "top_k", "expected one of iid"),
    ],
)
def test_refusals(tokens: list[int], q: list[list[float]] | None, drawn: Drawn, text: str) -> None:
    starts = np.array([0, 2])
    uniforms = draw_uniforms(starts)
    with pytest.raises(SpecExtError, match=text):
        multi_step(
            np.full((3, 2), 0.5),
            np.array([-1, -1]),
            np.array(tokens),
            starts,
            None if q is None else np.array(q),
            uniforms=uniforms,
            drawn=drawn,
        )
    with pytest.raises(SpecExtError, match="target row 0"):
        multi_step(
            np.full((3, 2), 4.0),
            np.array([-1, -1]),
            np.array([0, 1]),
            starts,
            None,
            uniforms=uniforms,
            drawn="one_hot",
        )
