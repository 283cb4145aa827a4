# SPDX-License-Identifier: Apache-2.0
"""Copies of whole KV blocks, of the layers that are named and of no others."""

from collections.abc import Iterable, Sequence

import torch


def copy_layer_blocks(
    caches: Iterable[torch.Tensor], num_blocks: int, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy blocks within each cache.

    vLLM's own function (0.32 ``copy_kv_cache_blocks_inplace``) copies what lies between blocks of
    a layer, too: other layers, in layouts that keep a block of all layers together. The target and
    the draft models use the same block ids for different things, so that would not do.

    Args:
        caches: Of layers; dimension 0 is blocks, or kernel blocks, as many for each block.
        num_blocks: Blocks of each.
        pairs: (from, to); no block may be on both sides.
    """
    if not pairs:
        return
    views = {cache.data_ptr(): cache.unflatten(0, (num_blocks, -1)) for cache in caches}
    if all(view.device.type == "cpu" for view in views.values()):
        # There a gather and a scatter move each block twice and by single elements: five times the
        # time, up to a tenth of a step.
        runs = copy_runs(pairs)
        for blocks in views.values():
            for source, first, end in runs:
                blocks[first:end] = blocks[source]
        return
    device = next(iter(views.values())).device
    ids = torch.tensor(list(pairs), dtype=torch.int64).to(device, non_blocking=True)
    sources, targets = ids.unbind(dim=1)
    for blocks in views.values():
        blocks[targets] = blocks[sources]


def copy_runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Copies (from, to) joined where one block goes to several in a row: (from, first, end)."""
    runs: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if runs and runs[-1][0] == source and runs[-1][2] == target:
            runs[-1] = (source, runs[-1][1], target + 1)
        else:
            runs.append((source, target, target + 1))
    return runs
