# SPDX-License-Identifier: Apache-2.0
"""Copies of whole KV blocks, of the layers that are named and of no others."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch


class LayerBlocks:
    """The KV blocks of some layers.

    vLLM's own function (0.32 ``copy_kv_cache_blocks_inplace``) copies what lies between blocks of
    a layer, too: other layers, in layouts that keep a block of all layers together. The target and
    the draft models use the same block ids for different things, so that would not do.
    """

    def __init__(self, caches: Iterable[torch.Tensor], num_blocks: int) -> None:
        """Look at the layers as few tensors.

        Args:
            caches: Of layers; dimension 0 is blocks, or kernel blocks, as many for each block.
            num_blocks: Blocks of each.
        """
        views = {cache.data_ptr(): cache.unflatten(0, (num_blocks, -1)) for cache in caches}
        self._stacks = _stacks(list(views.values()))

    def copy(self, pairs: Sequence[Sequence[int]], placed: torch.Tensor | None = None) -> None:
        """Copy blocks of each layer.

        Args:
            pairs: (from, to); no block may be on both sides.
            placed: [2 * n] int64 the same on the device, where it is there already.
        """
        if not pairs or not self._stacks:
            return
        device = self._stacks[0].device
        if device.type == "cpu":
            # There a gather and a scatter move each block twice and by single elements: five times
            # the time, up to a tenth of a step.
            runs = copy_runs(pairs)
            for blocks in self._stacks:
                for source, first, end in runs:
                    blocks[:, first:end] = blocks[:, source : source + 1]
            return
        if placed is None:
            placed = torch.tensor(pairs, dtype=torch.int64).to(device, non_blocking=True)
        sources, targets = placed.view(-1, 2).unbind(dim=1)
        for blocks in self._stacks:
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))


def _stacks(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[num_layers, num_blocks, ...] of layers that lie evenly in one storage; others alone."""
    storages: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for view in sorted(views, key=torch.Tensor.storage_offset):
        key = (view.untyped_storage().data_ptr(), view.dtype, view.shape, view.stride())
        storages.setdefault(key, []).append(view)
    found = []
    for layers in storages.values():
        offsets = [layer.storage_offset() for layer in layers]
        gaps = {behind - before for before, behind in pairwise(offsets)}
        if len(gaps) > 1:
            found += [layer[None] for layer in layers]
            continue
        first, gap = layers[0], max(gaps, default=0)
        shape, strides = (len(layers), *first.shape), (gap, *first.stride())
        found.append(first.as_strided(shape, strides, offsets[0]))
    return found


def copy_runs(pairs: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Copies (from, to) joined where one block goes to several in a row: (from, first, end)."""
    runs: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if runs and runs[-1][0] == source and runs[-1][2] == target:
            runs[-1] = (source, runs[-1][1], target + 1)
        else:
            runs.append((source, target, target + 1))
    return runs
