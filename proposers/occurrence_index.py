# SPDX-License-Identifier: Apache-2.0
"""Where a token sequence occurred before: an index that grows token by token.

Every position is linked to the previous one with the same token and to the previous one with the
same pair of tokens, so a look-up walks only the places that already agree with the suffix in its
last two tokens. Appending costs O(1) a token; 12 bytes a token plus two hash tables.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import IntArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

NO_POSITION = -1
_EMPTY_KEY = np.int64(-1)
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio


class Match(NamedTuple):
    """The longest suffix that occurred before, and where."""

    length: int  # tokens that agree, 0 = none
    count: int  # occurrences of that length; counting may stop at 2 once the answer is settled
    latest: int  # index just behind the last occurrence
    following: int  # index just behind the first occurrence after the hint, or -1


@njit(cache=True, nogil=True)
def _slot(keys, key):  # type: ignore[no-untyped-def]
    """Slot of a key, or the free slot where it belongs. keys: [power of two] int64."""
    mask = keys.size - 1
    hashed = (np.uint64(key) * _HASH_MULTIPLIER) >> np.uint64(20)
    slot = np.int64(hashed) & mask
    while keys[slot] != _EMPTY_KEY and keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, nogil=True)
def _link(tokens, start, end, previous, keys, heads):  # type: ignore[no-untyped-def]
    """Link positions [start, end): row 0 of the tables by token, row 1 by pair of tokens."""
    for i in range(start, end):
        key = np.int64(tokens[i])
        for order in range(2):
            if order == 1:
                if i == 0:
                    previous[1, 0] = NO_POSITION
                    break
                key |= np.int64(tokens[i - 1] + 1) << 32
            slot = _slot(keys[order], key)
            previous[order, i] = NO_POSITION
            if keys[order, slot] == key:
                previous[order, i] = heads[order, slot]
            keys[order, slot] = key
            heads[order, slot] = i


@njit(cache=True, nogil=True)
def _longest(  # type: ignore[no-untyped-def]
    suffix, tokens, end, previous, keys, heads, max_ngram, hint, need_all
):
    """See OccurrenceIndex.longest; `end` excludes positions that are the suffix itself."""
    size = suffix.size
    length, count, latest, following = 0, 0, NO_POSITION, NO_POSITION
    if size == 0:
        return length, count, latest, following
    limit = min(size, max_ngram)
    last = np.int64(suffix[size - 1])
    for order in range(1, -1, -1):
        key = last
        if order == 1:
            if limit < 2:
                continue
            key |= np.int64(suffix[size - 2] + 1) << 32
        slot = _slot(keys[order], key)
        if keys[order, slot] != key:
            continue
        i = heads[order, slot]
        while i != NO_POSITION:
            if i < end:
                agree = order + 1
                while (
                    agree < limit and i >= agree and tokens[i - agree] == suffix[size - 1 - agree]
                ):
                    agree += 1
                if agree > length:
                    length, count, latest, following = agree, 0, i + 1, NO_POSITION
                if agree == length:
                    count += 1
                    if i + 1 > hint:
                        following = i + 1
                    # Nothing longer can come, and an earlier place does not change the answer.
                    if length == limit and count == 2 and not need_all:
                        return length, count, latest, following
            i = previous[order, i]
        if length:
            break
    return length, count, latest, following


class OccurrenceIndex:
    """Tokens in the order they came, with look-up of earlier occurrences of a suffix."""

    def __init__(self, capacity: int = 64) -> None:
        """Make room for `capacity` tokens; more room is made when needed."""
        self._size = 0
        self._allocate(max(capacity, 16))

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> IntArray:
        """[len(self)] int32 tokens so far; a view that the next append may invalidate."""
        return self._tokens[: self._size]

    def append(self, tokens: IntArray) -> None:
        """Add tokens at the end.

        Args:
            tokens: [n] int32, each >= 0.
        """
        end = self._size + len(tokens)
        if end > len(self._tokens):
            old = self._tokens[: self._size]
            self._allocate(2 * end)
            self._tokens[: len(old)] = old
            _link(self._tokens, 0, len(old), self._previous, self._keys, self._heads)
        self._tokens[self._size : end] = tokens
        _link(self._tokens, self._size, end, self._previous, self._keys, self._heads)
        self._size = end

    def longest(
        self,
        suffix: IntArray,
        max_ngram: int,
        *,
        hint: int = NO_POSITION,
        need_all: bool = False,
        own: bool = False,
    ) -> Match:
        """The longest suffix of `suffix`, at most `max_ngram` tokens, that occurs in the index.

        Args:
            suffix: [m] int32 tokens, the newest last.
            max_ngram: Longest length that is compared.
            hint: `following` is the first continuation behind this index.
            need_all: Visit every occurrence, so that `count` and `following` are exact; without
                it the walk ends once two occurrences of the greatest length are known.
            own: The suffix is the end of the index itself; that occurrence does not count.
        """
        end = self._size - 1 if own else self._size
        found = _longest(
            suffix,
            self._tokens,
            end,
            self._previous,
            self._keys,
            self._heads,
            max_ngram,
            hint,
            need_all,
        )
        return Match(*found)

    def _allocate(self, capacity: int) -> None:
        slots = 1 << (2 * capacity - 1).bit_length()
        self._tokens: Int32s = np.empty(capacity, np.int32)
        self._previous: Int32s = np.empty((2, capacity), np.int32)
        self._keys: Int64s = np.full((2, slots), _EMPTY_KEY, np.int64)
        self._heads: Int32s = np.empty((2, slots), np.int32)
