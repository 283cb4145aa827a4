# SPDX-License-Identifier: Apache-2.0
"""Where a token sequence occurred before: an index that grows token by token.

Every position is linked to the previous one with the same token and to the previous one with the
same pair of tokens, so a look-up walks only the places that already agree with the suffix in its
last two tokens. Appending costs O(1) a token. The tables take 60 to 110 bytes for each token
that there is room for, and the room doubles when it is spent.
"""

import secrets
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import IntArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Arrays = tuple[Int32s, int, Int32s, Int64s, Int32s]

NO_POSITION = -1


class Match(NamedTuple):
    """The longest suffix that occurred before, and where."""

    length: int  # tokens that agree, 0 = none
    num_places: int  # occurrences of that length; counting may stop at 2 where it is settled
    latest: int  # index just behind the last occurrence
    following: int  # index just behind the first occurrence after the hint, or -1


class OccurrenceIndex:
    """Tokens in the order they came, with look-up of earlier occurrences of a suffix."""

    def __init__(self, capacity: int = 64) -> None:
        """Make room for `capacity` tokens; more room is made when needed."""
        from vllm_spec_ext.proposers.text_index import occurrence_kernels

        self._kernels = occurrence_kernels
        self._size = 0
        self._allocate(max(capacity, 16))

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> IntArray:
        """[len(self)] int32 tokens so far; a view that the next append may invalidate."""
        return self._tokens[: self._size]

    @property
    def arrays(self) -> Arrays:
        """For other compiled loops: tokens and their number, previous, keys, heads.

        See occurrence_kernels.py. Valid until the next append.
        """
        return self._tokens, self._size, self._previous, self._keys, self._heads

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
            self._kernels.link(self._tokens, 0, len(old), self._previous, self._keys, self._heads)
        self._tokens[self._size : end] = tokens
        self._kernels.link(self._tokens, self._size, end, self._previous, self._keys, self._heads)
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
            need_all: Look for the first continuation behind the hint; without it the walk ends
                once two occurrences of the greatest length are known. Of the places that agree in
                the last two tokens the latest 4,096 are compared, with it the latest 32,768.
            own: The suffix is the end of the index itself; that occurrence does not count.
        """
        end = self._size - 1 if own else self._size
        found = self._kernels.longest(
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
        self._keys: Int64s = np.full((2, slots), self._kernels.EMPTY_KEY, np.int64)
        self._heads: Int32s = np.empty((2, slots + 1), np.int32)
        self._heads[:, -1] = secrets.randbits(31)  # see occurrence_kernels._slot


def warm_up() -> None:
    """Compile the loops now, not in the first request."""
    index = OccurrenceIndex()
    index.append(np.zeros(4, np.int32))
    index.longest(index.tokens[2:], 2, own=True)
