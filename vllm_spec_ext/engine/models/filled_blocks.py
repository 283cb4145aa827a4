# SPDX-License-Identifier: Apache-2.0
"""Which KV of a draft model is there: numbers about physical KV blocks, without vLLM.

Blocks belong to vLLM's block manager: it hands them to requests, frees them, and gives one block
to several requests whose texts begin alike (prefix cache). A draft model that reads every token in
every step would find its KV wherever the target finds its own. Ours may skip steps, so for every
block it is known how many leading positions hold the model's KV of what the block stands for now.
Requests that share a block share that number, and whoever brings it up to date does so for all.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


class FilledBlocks:
    """Of one model."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start with nothing filled.

        Args:
            num_blocks: Of the requests; scratch blocks are not counted.
            block_size: Tokens a block.
        """
        self.block_size = block_size
        self._filled = np.zeros(num_blocks, np.int32)
        self._expected: list[tuple[Int32s, Int32s]] = []  # blocks, and what they held before

    def enter(self, blocks: Sequence[int], num_computed: int) -> None:
        """A request came with these blocks, or came back.

        What is behind its computed tokens was allocated just now, for other contents than the
        block had before; what is in front was found in the prefix cache and keeps its contents. A
        session that goes on may have a block in which only the first tokens stay.

        Args:
            blocks: Of the request, in order of its positions.
            num_computed: Tokens whose KV the target has.
        """
        num_full, rest = divmod(num_computed, self.block_size)
        ids = np.asarray(blocks, np.int64)
        if rest:
            partial = ids[num_full]
            self._filled[partial] = min(rest, int(self._filled[partial]))
            num_full += 1
        self._filled[ids[num_full:]] = 0

    def allocate(self, blocks: Sequence[int]) -> None:
        """These blocks were given to a request that goes on: their contents will be new."""
        self._filled[np.asarray(blocks, np.int64)] = 0

    def copied(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Blocks were copied with the KV of all layers, (from, to)."""
        for source, target in pairs:
            self._filled[target] = self._filled[source]

    def leading(self, table: Int32s, limit: int, known: int = 0) -> int:
        """Positions from the first one on whose KV is there.

        Args:
            table: [n] blocks of a request.
            limit: Positions to look at; at most n blocks.
            known: Positions known to be there, to save time.
        """
        size = self.block_size
        first, end = min(known, limit) // size, -(-limit // size)
        filled = self._filled[table[first:end]]
        short = np.flatnonzero(filled < size)
        if not len(short):
            return limit
        found = (first + int(short[0])) * size + int(filled[short[0]])
        return min(limit, max(found, min(known, limit)))

    def fill(self, table: Int32s, start: int, end: int) -> None:
        """A request's positions from `start` to before `end` get their KV.

        Args:
            table: [n] its blocks; `end` is at most n blocks.
            start: Everything before is there.
            end: One behind the last position.
        """
        if end <= start:
            return
        size = self.block_size
        first, last = start // size, (end - 1) // size
        self._filled[table[first:last]] = size
        block = table[last]
        self._filled[block] = max(int(self._filled[block]), end - last * size)

    def expect(self, table: Int32s, start: int, end: int) -> None:
        """The same of a pass to come: :meth:`confirm` when it ran, or :meth:`take_back`."""
        if end > start:
            size = self.block_size
            blocks = table[start // size : -(-end // size)].copy()
            self._expected.append((blocks, self._filled[blocks]))
            self.fill(table, start, end)

    def confirm(self) -> None:
        """What was expected is there."""
        self._expected.clear()

    def take_back(self) -> None:
        """What was expected is not there, and everything else is as it was."""
        while self._expected:
            blocks, before = self._expected.pop()
            self._filled[blocks] = before

    def clear(self) -> None:
        """Nothing is known any more."""
        self._expected.clear()
        self._filled[:] = 0
