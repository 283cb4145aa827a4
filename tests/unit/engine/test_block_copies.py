# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks touch the layers that are named and no others."""

import pytest
import torch

from vllm_spec_ext.engine.trees.block_copies import LayerBlocks, copy_runs

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
    LayerBlocks([mine, mine], NUM_BLOCKS).copy([(0, 3), (0, 4), (5, 1)])
    expected = before[0].unflatten(0, (NUM_BLOCKS, per_block))[[0, 5, 2, 0, 0, 5]]
    assert torch.equal(mine.unflatten(0, (NUM_BLOCKS, per_block)), expected)
    assert torch.equal(other, before[1])


@pytest.mark.parametrize("mine", [[0, 2, 4], [1, 3], [0, 1, 4], [2], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("outermost", ["layers", "blocks"])
def test_layers_of_one_storage_are_copied_wherever_they_lie(
    outermost: str, mine: list[int]
) -> None:
    """Evenly spaced layers are one tensor, so that a copy takes as long for many as for one."""
    shape = (5, NUM_BLOCKS, 3) if outermost == "layers" else (NUM_BLOCKS, 5, 3)
    storage = torch.arange(5.0 * NUM_BLOCKS * 3).reshape(shape)
    dim = 0 if outermost == "layers" else 1
    before, layers = storage.clone().unbind(dim), storage.unbind(dim)
    elsewhere = torch.arange(3.0 * NUM_BLOCKS).reshape(NUM_BLOCKS, 3)
    LayerBlocks([*(layers[i] for i in mine), elsewhere], NUM_BLOCKS).copy([(0, 3), (0, 4), (5, 1)])
    order = [0, 5, 2, 0, 0, 5]
    assert elsewhere[:, 0].tolist() == [3.0 * block for block in order]
    for i, layer in enumerate(layers):
        assert torch.equal(layer, before[i][order] if i in mine else before[i])
