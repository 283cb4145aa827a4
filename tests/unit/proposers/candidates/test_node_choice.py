# SPDX-License-Identifier: Apache-2.0
"""How many nodes each request drafts: the best of all choices, by trying all."""

import itertools

import numpy as np
import pytest

from vllm_spec_ext.proposers.candidates.node_choice import choose, expected_gain


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_earns_more(seed: int) -> None:
    random = np.random.default_rng(seed)
    paths = [
        np.sort(random.random(int(random.integers(0, 5))))[::-1].astype(np.float32)
        for _ in range(3)
    ]
    cost, fixed = random.uniform(0.05, 0.6), random.choice([0.0, 0.3, 1.5])
    most = random.choice([2, 5, 100])

    def earned(counts: tuple[int, ...]) -> float:
        total = sum(counts)
        gain = sum(float(one[:n].sum()) for one, n in zip(paths, counts, strict=True))
        return gain - cost * total - (fixed if total else 0.0)

    ranges = [range(len(one) + 1) for one in paths]
    possible = [counts for counts in itertools.product(*ranges) if sum(counts) <= most]
    best = max(map(earned, possible))
    assert earned(tuple(choose(paths, cost, fixed, most))) == pytest.approx(best, abs=1e-5)


def test_with_nothing_known_all_nodes_are_drafted() -> None:
    paths = [np.array([0.5, 0.1], np.float32), np.array([], np.float32)]
    assert choose(paths, 0.0) == [2, 0]
    assert expected_gain(paths[0], 0.2) == pytest.approx(0.3)
