# SPDX-License-Identifier: Apache-2.0
"""Of which KV blocks the mean key is known: numbers about physical blocks, without vLLM.

A mean belongs to what a block stands for now. It is made once, when all tokens of the block are
certain, and serves every request that shares the block. When the block manager gives a block to a
request, or a session goes on with other tokens, the mean is void.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class KnownPages:
    """Rank 0 keeps them for all ranks: the means lie under the same block ids everywhere."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start with nothing known.

        Args:
            num_blocks: Of the requests.
            block_size: Tokens a block.
        """
        self._block_size = block_size
        self._known = np.zeros(num_blocks, np.bool_)

    def enter(self, blocks: Sequence[int], num_computed: int) -> None:
        """A request came with these blocks, or came back.

        Args:
            blocks: Of the request, in order of its positions.
            num_computed: Tokens whose KV is there: whole blocks of them keep their contents.
        """
        self.allocate(blocks[num_computed // self._block_size :])

    def allocate(self, blocks: Sequence[int]) -> None:
        """These blocks get other contents."""
        self._known[np.asarray(blocks, np.int64)] = False

    def copied(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Blocks were copied, (from, to); the copy's mean is made again."""
        for _, target in pairs:
            self._known[target] = False

    def unknown(self, blocks: NDArray[np.integer]) -> NDArray[np.int64]:
        """Those of these blocks whose mean is not known, each once."""
        return np.unique(blocks[~self._known[blocks]].astype(np.int64))

    def learn(self, blocks: NDArray[np.int64]) -> None:
        """The means of these blocks are made now."""
        self._known[blocks] = True

    def clear(self) -> None:
        """Nothing is known any more."""
        self._known[:] = False
