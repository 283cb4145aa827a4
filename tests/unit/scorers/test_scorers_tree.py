# SPDX-License-Identifier: Apache-2.0
"""Tree walks: against a slow walk, and their output distribution by exact enumeration."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spec_ext.scorers.walk.tree import (
    node_depths,
    node_rows,
    verifying_rows,
    walk,
    walk_samples,
)

Tokens = tuple[int, ...]
VOCAB = 3
LENGTH = 3


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), relaxed=st.booleans())
def test_walk_equals_reference(seed: int, relaxed: bool) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 8, 5)
    starts = np.concatenate([[0], sizes.cumsum()])
    parents = np.array([rng.integers(-1, i) for n in sizes for i in range(n)], np.int64)
    tokens = rng.integers(0, 4, len(parents))
    choices = rng.integers(0, 4, len(parents) + 5)
    tolerated = rng.random(len(parents)) < 0.4
    logits = rng.integers(0, 3, len(parents)).astype(np.float32)
    if relaxed:
        found = walk(parents, tokens, starts, choices, tolerated=tolerated, draft_logits=logits)
    else:
        tolerated[:] = False
        found = walk_samples(
            torch.from_numpy(parents), tokens, starts, torch.from_numpy(choices).to(torch.int32)
        )
    for r in range(5):
        first, node, path = int(starts[r]), -1, []
        while True:
            choice = int(choices[first + r + 1 + node])
            children = [i for i in range(sizes[r]) if parents[first + i] == node]
            exact = [i for i in children if tokens[first + i] == choice]
            near = [i for i in children if tolerated[first + i]]
            near.sort(key=lambda i: (-logits[first + i], tokens[first + i], i))
            if not exact and not near:
                break
            node = (exact or near)[0]
            path.append(node)
        assert found.num_accepted[r] == len(path)
        assert found.accepted[r].tolist() == path + [-1] * (found.accepted.shape[1] - len(path))
        emitted = [int(tokens[first + i]) for i in path] + [choice]
        assert found.emitted[r].tolist() == emitted + [-1] * (found.emitted.shape[1] - len(emitted))


def test_layout_and_shapes() -> None:
    parents, starts = [-1, 0, 0, -1, 0], [0, 3, 3, 5]
    roots, own = node_rows(np.array(starts))
    assert roots.tolist() == [0, 4, 5]
    assert own.tolist() == [1, 2, 3, 6, 7]
    assert verifying_rows(np.array(parents), np.array(starts)).tolist() == [0, 1, 1, 5, 6]
    assert node_depths(np.array(parents), np.array(starts)).tolist() == [0, 1, 1, 0, 1]
    empty = walk_samples(np.empty(0), np.empty(0), np.array([0, 0]), np.array([7]))
    assert empty.accepted.shape == (1, 0)
    assert empty.emitted.tolist() == [[7]]
    with pytest.raises(ValueError, match="expected one parent and token a node"):
        walk_samples(np.array([-1]), np.array([0]), np.array([0, 1]), np.array([7]))


def target_distribution(prefix: Tokens) -> np.ndarray:
    """Next-token probabilities after a prefix; different for every prefix."""
    weights = np.random.default_rng([17, *prefix]).random(VOCAB) + 0.05
    return weights / weights.sum()


def sequence_distribution() -> dict[Tokens, float]:
    """Of LENGTH tokens generated one by one: what every lossless method must reproduce."""
    distribution: dict[Tokens, float] = {}
    for sequence in itertools.product(range(VOCAB), repeat=LENGTH):
        distribution[sequence] = float(
            np.prod([target_distribution(sequence[:i])[x] for i, x in enumerate(sequence)])
        )
    return distribution


def completed(distribution: dict[Tokens, float]) -> dict[Tokens, float]:
    """Emissions of different length, each continued by plain decoding and cut to LENGTH."""
    out: defaultdict[Tokens, float] = defaultdict(float)
    for emitted, probability in distribution.items():
        if len(emitted) >= LENGTH:
            out[emitted[:LENGTH]] += probability
            continue
        for token, p in enumerate(target_distribution(emitted)):
            for sequence, q in completed({(*emitted, token): probability * float(p)}).items():
                out[sequence] += q
    return dict(out)


def prefixes(parents: Sequence[int], tokens: Sequence[int]) -> list[Tokens]:
    """Prefix of every row: the root's, then each node's path."""
    rows: list[Tokens] = [()]
    for parent, token in zip(parents, tokens, strict=True):
        rows.append((*rows[parent + 1], token))
    return rows


def emission_distribution(parents: Sequence[int], tokens: Sequence[int]) -> dict[Tokens, float]:
    """Exact distribution of the walk's emission: every combination of draws, weighted."""
    rows = prefixes(parents, tokens)
    distribution: defaultdict[Tokens, float] = defaultdict(float)
    combinations = np.array(list(itertools.product(range(VOCAB), repeat=len(rows))))
    n = len(combinations)
    found = walk_samples(
        np.tile(parents, n),
        np.tile(tokens, n),
        np.arange(n + 1) * len(tokens),
        combinations.ravel(),
    )
    weights = np.prod(
        [target_distribution(r)[combinations[:, i]] for i, r in enumerate(rows)], axis=0
    )
    for emitted, weight in zip(found.emitted, weights, strict=True):
        distribution[tuple(int(x) for x in emitted if x >= 0)] += float(weight)
    return distribution


def distance(distribution: dict[Tokens, float]) -> float:
    """Total variation between a method's distribution of LENGTH tokens and the target's."""
    expected = sequence_distribution()
    return 0.5 * sum(abs(completed(distribution).get(s, 0.0) - p) for s, p in expected.items())


TREES = [
    ([], []),
    ([-1, 0, 1], [0, 0, 1]),
    ([-1, 0, 0, -1, 3, -1], [0, 1, 2, 1, 1, 2]),
    ([-1, 0, -1, 2, 2], [2, 2, 0, 0, 1]),
    ([-1, -1, 0, 1], [1, 1, 0, 2]),  # one token twice under the root
]


@pytest.mark.parametrize(("parents", "tokens"), TREES, ids=str)
def test_walk_is_lossless(parents: list[int], tokens: list[int]) -> None:
    assert distance(emission_distribution(parents, tokens)) < 1e-12


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """All root-to-leaf paths, as node indices."""
    leaves = [i for i in range(len(parents)) if i not in parents]
    paths = []
    for leaf in leaves:
        path: list[int] = []
        node = leaf
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        paths.append(path)
    return paths


def resampling_distribution(parents: Sequence[int], tokens: Sequence[int]) -> dict[Tokens, float]:
    """The known bug: after a mismatch, draw again from the unchanged distribution."""
    distribution: defaultdict[Tokens, float] = defaultdict(float)
    for emitted, probability in emission_distribution(parents, tokens).items():
        for token, p in enumerate(target_distribution(emitted[:-1])):
            distribution[(*emitted[:-1], token)] += probability * float(p)
    return distribution


def per_path_distribution(parents: Sequence[int], tokens: Sequence[int]) -> dict[Tokens, float]:
    """The other known bug: a draw for each (path, position), then the longest accepted path.

    The last token is the longest path's own draw at its first mismatch or end, so that this
    bug is tested without the first.
    """
    paths = paths_of(parents)
    positions = [(k, i) for k, path in enumerate(paths) for i in range(len(path) + 1)]
    distribution: defaultdict[Tokens, float] = defaultdict(float)
    for draws in itertools.product(range(VOCAB), repeat=len(positions)):
        drawn = dict(zip(positions, draws, strict=True))
        weight = 1.0
        best: Tokens = ()
        for k, path in enumerate(paths):
            words = tuple(tokens[i] for i in path)
            for i in range(len(path) + 1):
                weight *= float(target_distribution(words[:i])[drawn[k, i]])
            length = 0
            while length < len(path) and drawn[k, length] == words[length]:
                length += 1
            if length >= len(best):
                best = (*words[:length], drawn[k, length])
        distribution[best] += weight
    return distribution


@pytest.mark.parametrize("buggy", [resampling_distribution, per_path_distribution])
def test_known_bugs_are_not_lossless(buggy: Callable[..., dict[Tokens, float]]) -> None:
    """The check that the walk passes rejects what the reference codes do."""
    distribution = buggy([-1, 0, -1], [0, 1, 1])
    assert sum(distribution.values()) == pytest.approx(1.0)
    assert distance(distribution) > 0.02
