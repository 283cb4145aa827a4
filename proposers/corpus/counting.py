# SPDX-License-Identifier: Apache-2.0
"""Trigram counts of a corpus that need not fit in memory: sorted runs on disk, then one merge.

A trigram is one 64-bit key, w1 << 42 | w2 << 21 | w3; a bigram has the sentinel (the vocabulary's
size) as w1, so it comes after all trigrams. Keys are collected in a buffer of bounded size, sorted,
counted and written as a run; runs are merged block by block with numpy.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Counts = NDArray[np.int64]
BYTES_PER_KEY = 32  # key, its sorted copy, and the masks of counting


def count_sorted(keys: Keys, counts: Counts | None = None) -> tuple[Keys, Counts]:
    """Distinct keys and the sums of their counts.

    Args:
        keys: [n] sorted.
        counts: [n]; all 1 if left out.
    """
    if not len(keys):
        return keys, np.zeros(0, np.int64)
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    if counts is None:
        return keys[starts], np.diff(np.append(starts, len(keys)))
    return keys[starts], np.add.reduceat(counts, starts)


class Counter:
    """Collects n-grams of documents; spills sorted runs to a folder."""

    def __init__(self, vocab_size: int, folder: Path, memory_bytes: int) -> None:
        """Reserve the buffer.

        Args:
            vocab_size: Also the sentinel.
            folder: Empty folder for the runs.
            memory_bytes: Bound for the buffer and its sorting, approximately.
        """
        self.vocab_size = vocab_size
        self.unigrams = np.zeros(vocab_size, np.int64)
        self.num_tokens = 0
        self.runs: list[Path] = []
        self._folder = folder
        self._capacity = max(1 << 12, memory_bytes // BYTES_PER_KEY)
        self._buffer = np.empty(self._capacity, np.uint64)
        self._used = 0

    def add(self, tokens: NDArray[np.uint64]) -> None:
        """Count one document's n-grams; none spans two documents.

        Args:
            tokens: [n] uint64 ids inside the vocabulary.
        """
        self.num_tokens += len(tokens)
        self.unigrams += np.bincount(tokens.astype(np.int64), minlength=self.vocab_size)
        if len(tokens) < 2:
            return
        pairs = (tokens[:-1] << np.uint64(21)) | tokens[1:]
        self._put(pairs | np.uint64(self.vocab_size << 42))
        self._put((tokens[:-2] << np.uint64(42)) | pairs[1:])

    def _put(self, keys: Keys) -> None:
        while len(keys):
            part = keys[: self._capacity - self._used]
            self._buffer[self._used : self._used + len(part)] = part
            self._used += len(part)
            keys = keys[len(part) :]
            if self._used == self._capacity:
                self._spill()

    def _spill(self) -> None:
        keys = self._buffer[: self._used]
        keys.sort()
        distinct, counts = count_sorted(keys)
        path = self._folder / f"run-{len(self.runs)}.npy"
        np.save(path, np.stack((distinct, counts.astype(np.uint64)), axis=1))
        self.runs.append(path)
        self._used = 0

    def merged(self) -> Iterator[tuple[Keys, Counts]]:
        """Blocks of distinct keys with counts, ascending over all blocks; ends the collecting."""
        if self._used:
            self._spill()
        block = max(1 << 10, self._capacity // (2 * max(1, len(self.runs))))
        self._buffer = np.empty(0, np.uint64)
        yield from merge_runs([np.load(path, mmap_mode="r") for path in self.runs], block)


def merge_runs(runs: Sequence[NDArray[np.uint64]], block: int) -> Iterator[tuple[Keys, Counts]]:
    """Merge sorted runs.

    Args:
        runs: Arrays [n, 2] of distinct ascending keys and their counts.
        block: Rows read of each run at a time.
    """
    places = [0] * len(runs)
    while True:
        heads = [np.array(run[at : at + block]) for run, at in zip(runs, places, strict=True)]
        if not any(len(head) for head in heads):
            return
        # A key may only leave once no run can hold it beyond what was read of it.
        open_ends = [
            head[-1, 0]
            for head, run, at in zip(heads, runs, places, strict=True)
            if len(head) and at + len(head) < len(run)
        ]
        limit = min(open_ends) if open_ends else np.uint64(0xFFFFFFFFFFFFFFFF)
        parts = []
        for index, head in enumerate(heads):
            number = int(np.searchsorted(head[:, 0], limit, side="right"))
            places[index] += number
            parts.append(head[:number])
        rows = np.concatenate(parts)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        yield count_sorted(rows[:, 0], rows[:, 1].astype(np.int64))
