# SPDX-License-Identifier: Apache-2.0
"""Rows of one depth draw the noise of plain decoding, and the generator ends where it would."""

import numpy as np
import torch

from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.engine.verifying.seeded_rows import SeededRows


def draw(generator: torch.Generator) -> list[float]:
    """One row of noise, as a sampler takes it."""
    return torch.rand(5, generator=generator).tolist()


def plain_noise(seed: int, count: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    return [draw(generator) for _ in range(count)]


def test_noise_follows_depth() -> None:
    # Request 0 has no seed; request 1 a tree, 2 a chain, 3 nothing to verify.
    batch = DraftBatch.of(
        [[9], [1, 2, 3, 4, 5], [6, 7, 8], []], [None, [-1, 0, -1, 2, 0], None, None]
    )
    seeds = {1: 11, 2: 22, 3: 33}
    own = {request: torch.Generator().manual_seed(seed) for request, seed in seeds.items()}
    rows = SeededRows(own, batch)
    assert len(rows) == 6 + 4 + 1
    for _ in range(2):  # a sampler may go over them twice
        found = {row: draw(generator) for row, generator in rows.items()}
        for row, noise in found.items():
            request, depth = int(batch.request_of_row[row]), int(batch.depth_of_row[row])
            assert noise == plain_noise(seeds[request], depth + 1)[depth]
    rows.settle(np.array([1, 2, 0, 0]), own)
    for request, num_accepted in ((1, 2), (2, 0), (3, 0)):
        following = plain_noise(seeds[request], num_accepted + 2)[num_accepted + 1]
        assert draw(own[request]) == following


def test_a_step_that_draws_nothing_moves_nothing() -> None:
    own = {0: torch.Generator().manual_seed(5)}
    batch = DraftBatch.of([[1, 2]], [None])
    SeededRows(own, batch).settle(np.array([2]), own)
    assert draw(own[0]) == plain_noise(5, 1)[0]
