# SPDX-License-Identifier: Apache-2.0
"""Mean key of each KV block and layer, made by reading the cache; of one rank.

The cache is read, and not what is written to it: blocks that were found in the prefix cache never
pass through a write. The means take 1 / (2 * block size) of the memory of the KV cache.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

KeyReader = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(cache of a layer, [m] block ids) -> keys [m, num_kv_heads, block_size, head_size]."""

_CHUNK = 64  # blocks that are read at once, to bound what is copied


class PageMeans:
    """Of the layers whose views choose pages."""

    def __init__(
        self, caches: Mapping[str, torch.Tensor], read_keys: KeyReader, block_size: int
    ) -> None:
        """Make room for the means of all blocks.

        Args:
            caches: [num_blocks, num_kv_heads, ...] of each layer.
            read_keys: Finds the keys in them.
            block_size: Tokens a block.
        """
        self._caches = dict(caches)
        self._read_keys = read_keys
        self._means: dict[str, torch.Tensor] = {}
        for name, cache in self._caches.items():
            num_blocks, num_heads = cache.shape[:2]
            size = cache[0, 0].numel() // (2 * block_size)
            self._means[name] = cache.new_zeros(num_blocks, num_heads, size)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """[num_blocks, num_kv_heads, head_size] of each layer."""
        return list(self._means.values())

    def update(self, blocks: NDArray[np.int64]) -> None:
        """Make the means of these blocks from what the cache holds now."""
        if not len(blocks):
            return
        device = next(iter(self._caches.values())).device
        on_device = torch.from_numpy(blocks).to(device)
        for first in range(0, len(blocks), _CHUNK):
            ids = on_device[first : first + _CHUNK]
            for name in self._caches:
                self._means[name][ids] = self.read(name, ids)

    def read(self, layer: str, blocks: torch.Tensor) -> torch.Tensor:
        """[m, num_kv_heads, head_size] means of blocks [m] as the cache has them now."""
        keys = self._read_keys(self._caches[layer], blocks)
        return keys.float().mean(dim=2).to(keys.dtype)

    def of(self, layer: str, blocks: torch.Tensor) -> torch.Tensor:
        """[..., num_kv_heads, head_size] means of blocks [...] as they were made."""
        return self._means[layer][blocks]


def rows_of_keys(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Keys of caches [num_blocks, num_kv_heads, block_size, 2 * head_size], key and value in a row.

    That is what vLLM's FlashAttention and Triton backends read (0.32
    ``FlashAttentionImpl.forward``: ``kv_cache.transpose(1, 2).split(head_size)``).
    """
    return cache[..., : cache.shape[-1] // 2][blocks]


def columns_of_keys(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Keys of vLLM's CPU caches for the instruction set "vec" (0.32 ``csrc/cpu/cpu_attn_vec.hpp``).

    The first half of a block holds the keys of a head transposed, [head_size, block_size].
    """
    num_blocks, num_heads, block_size, both = cache.shape
    size = both // 2
    halves = cache.view(num_blocks, num_heads, 2, size * block_size)
    keys = halves[:, :, 0][blocks].view(len(blocks), num_heads, size, block_size)
    return keys.transpose(-1, -2)
