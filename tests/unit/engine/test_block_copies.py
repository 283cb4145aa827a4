# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks touch the layers that are named and no others."""

import pytest
import torch

from vllm_spec_ext.engine.trees.block_copies import copy_layer_blocks, copy_runs

NUM_BLOCKS = 6


def test_copies_of_one_block_are_joined() -> None:
    assert copy_runs([(5, 9), (5, 10), (5, 12), (6, 13), (7, 3)]) == [
        (5, 9, 11),
        (5, 12, 13),
        (6, 13, 14),
        (7, 3, 4),
    ]
    assert copy_runs([]) == []


@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("outermost", ["layers", "blocks"])
def test_other_layers_of_the_same_storage_stay(outermost: str, per_block: int) -> None:
    """In layouts that keep a block of all layers together, too."""
    size = NUM_BLOCKS * per_block
    shape = (2, size, 3) if outermost == "layers" else (size, 2, 3)
    storage = torch.arange(2.0 * size * 3).reshape(shape)
    mine, other = storage.unbind(0 if outermost == "layers" else 1)
    before = storage.clone().unbind(0 if outermost == "layers" else 1)
    copy_layer_blocks([mine, mine], NUM_BLOCKS, [(0, 3), (0, 4), (5, 1)])
    expected = before[0].unflatten(0, (NUM_BLOCKS, per_block))[[0, 5, 2, 0, 0, 5]]
    assert torch.equal(mine.unflatten(0, (NUM_BLOCKS, per_block)), expected)
    assert torch.equal(other, before[1])
