# SPDX-License-Identifier: Apache-2.0
"""Which rows of the overlays have changed since somebody last copied them.

A copy of the tables elsewhere, on a device say, is kept by its changed rows alone: at most two for
each token that is learned. Rows of all overlays are numbered one after the other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.compiled import kernel
from vllm_spec_ext.proposers.adaptive_ngram.overlay import (
    SUCCESSORS,
    OverlayArrays,
    OverlayPool,
    find_row,
)
from vllm_spec_ext.proposers.base import IntArray

WORDS = 2 + SUCCESSORS  # of 8 bytes, a row: key, stamp, 8 tokens, 8 weights


class Changes(NamedTuple):
    """Of one pool; a row stands in the list once."""

    is_listed: NDArray[np.bool_]  # [slots, rows]
    listed: NDArray[np.int64]  # [slots * rows], of which `num` are used
    num: NDArray[np.int64]  # [1]


@kernel
def list_rows(
    arrays: OverlayArrays,
    changes: Changes,
    slot: int,
    tokens: NDArray[np.int32],
    start: int,
    vocab_size: int,
) -> None:
    """List the rows that ``learn`` with these arguments has changed.

    One that was pushed out since is listed for what has taken its place.
    """
    num_rows = arrays.keys.shape[1]
    for place in range(max(start, 1), len(tokens)):
        w2 = tokens[place - 1]
        if w2 < 0 or w2 >= vocab_size:
            continue
        for w1 in (vocab_size, int(tokens[place - 2]) if place >= 2 else -1):
            row = find_row(arrays, slot, w1, w2) if 0 <= w1 <= vocab_size else -1
            if row >= 0 and not changes.is_listed[slot, row]:
                changes.is_listed[slot, row] = True
                changes.listed[changes.num[0]] = slot * num_rows + row
                changes.num[0] += 1


@kernel
def pack_rows(
    arrays: OverlayArrays, changes: Changes, first: int, packed: NDArray[np.int64]
) -> None:
    """Write the listed rows as they are now, and empty the list.

    Args:
        arrays: Of the pool.
        changes: Of the pool.
        first: Number of the pool's first row.
        packed: [>= num, 1 + WORDS] int64, filled: the row's number, then its words.
    """
    num_rows = arrays.keys.shape[1]
    for index in range(changes.num[0]):
        slot, row = divmod(changes.listed[index], num_rows)
        changes.is_listed[slot, row] = False
        packed[index, 0] = first + changes.listed[index]
        packed[index, 1] = np.int64(arrays.keys[slot, row])
        packed[index, 2] = arrays.stamps[slot, row]
        packed[index, 3:7] = arrays.tokens[slot, row].view(np.int64)
        packed[index, 7:11] = arrays.weights[slot, row].view(np.int64)
    changes.num[0] = 0


class ChangedRows:
    """Of several pools; starts with all rows that hold something."""

    def __init__(self, pools: Sequence[OverlayPool]) -> None:
        """List what the pools hold already.

        Args:
            pools: In the order in which their rows are numbered.
        """
        self._pools = pools
        self._changes = []
        self._generations = [pool.arrays.generations.copy() for pool in pools]
        self.first_rows: list[int] = []
        self.num_rows = 0
        for pool in pools:
            shape = pool.arrays.keys.shape
            self.first_rows.append(self.num_rows)
            self.num_rows += shape[0] * shape[1]
            changes = Changes(
                np.zeros(shape, np.bool_),
                np.zeros(shape[0] * shape[1], np.int64),
                np.zeros(1, np.int64),
            )
            self._changes.append(changes)
            for slot in np.flatnonzero(pool.arrays.keys.any(axis=1)).tolist():
                _list_slot(changes, slot, pool.arrays.keys[slot] != 0)

    def learned(
        self, pool: OverlayPool, slot: int, tokens: IntArray, start: int, vocab_size: int
    ) -> None:
        """A pool has learned ``tokens[start:]``; see :func:`.overlay.learn`."""
        changes = self._changes[self._pools.index(pool)]
        list_rows(pool.arrays, changes, slot, tokens, start, vocab_size)

    def begin(self, pool: OverlayPool, slot: int) -> tuple[int, int, int]:
        """An overlay for whoever looks into the copy: its first row, generation and clock."""
        number = self._pools.index(pool)
        arrays, before = pool.arrays, self._generations[number]
        generation = int(arrays.generations[slot])
        if generation < before[slot]:
            # It counts from the beginning: rows of long ago would come alive in the copy.
            _list_slot(self._changes[number], slot, np.ones(arrays.keys.shape[1], np.bool_))
        before[slot] = generation
        first = self.first_rows[number] + slot * arrays.keys.shape[1]
        return first, generation, int(arrays.clocks[slot])

    def take(self) -> NDArray[np.int64]:
        """[n, 1 + WORDS] the changed rows as they are now, each with its number; once."""
        counts = [int(changes.num[0]) for changes in self._changes]
        packed = np.empty((sum(counts), 1 + WORDS), np.int64)
        start = 0
        for pool, changes, first, count in zip(
            self._pools, self._changes, self.first_rows, counts, strict=True
        ):
            pack_rows(pool.arrays, changes, first, packed[start : start + count])
            start += count
        return packed

    def give_back(self, numbers: NDArray[np.int64]) -> None:
        """List rows again that were taken, [n] numbers, and did not come to the copy."""
        for pool, changes, first in zip(self._pools, self._changes, self.first_rows, strict=True):
            shape = pool.arrays.keys.shape
            own = numbers - first
            wanted = np.zeros(shape, np.bool_)
            wanted.flat[own[(own >= 0) & (own < wanted.size)]] = True
            for slot in np.flatnonzero(wanted.any(axis=1)).tolist():
                _list_slot(changes, slot, wanted[slot])


def _list_slot(changes: Changes, slot: int, wanted: NDArray[np.bool_]) -> None:
    """List some rows of an overlay, [rows] bool."""
    new = np.flatnonzero(wanted & ~changes.is_listed[slot])
    count = int(changes.num[0])
    changes.is_listed[slot, new] = True
    changes.listed[count : count + len(new)] = slot * len(wanted) + new
    changes.num[0] += len(new)


def warm_up() -> None:
    """Compile the kernels with a table of its own."""
    pool = OverlayPool(1, 1)
    changed = ChangedRows([pool])
    changed.learned(pool, 0, np.zeros(2, np.int32), 1, 1)
    changed.take()
