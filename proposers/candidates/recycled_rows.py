# SPDX-License-Identifier: Apache-2.0
"""Token recycling: what the target foresaw at rows that were verified anyway.

Luo et al. 2024, "Turning Trash into Treasure", keep an adjacency matrix of tokens: the candidates
of a step's last row under its token. Here every verified row counts, those of rejected nodes
included, with the probabilities; under its last two tokens, backing off to one; the newest wins.

Rows of one share group are seen by requests of that group alone: its number is part of the key.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import IntArray

if TYPE_CHECKING:
    from vllm_spec_ext.proposers.records import NextTokens

NUM_KEPT = 8  # tokens of a row


class RecycledRows:
    """A table of a fixed size: the oldest rows make room for new ones."""

    def __init__(self, num_contexts: int) -> None:
        """Start empty.

        Args:
            num_contexts: Contexts there is room for, rounded up to a power of two; 80 bytes each.
        """
        from vllm_spec_ext.proposers.candidates import kernels

        self._kernels = kernels
        slots = 1 << max(num_contexts - 1, kernels.WAYS - 1).bit_length()
        self._keys: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._stamps: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._tokens: IntArray = np.zeros((slots, NUM_KEPT), np.int32)
        self._probs: NDArray[np.float32] = np.zeros((slots, NUM_KEPT), np.float32)
        self._now = 1

    def __len__(self) -> int:
        return int(np.count_nonzero(self._keys))

    @property
    def table(self) -> tuple[NDArray[np.int64], IntArray, NDArray[np.float32]]:
        """For the search: keys, tokens and probabilities."""
        return self._keys, self._tokens, self._probs

    def keep(self, group: int, rows: "NextTokens") -> None:
        """Remember what the target foresaw.

        Args:
            group: Number of those who may see it, from 0.
            rows: Of one request's step.
        """
        self._kernels.keep_rows(
            self._keys,
            self._stamps,
            self._tokens,
            self._probs,
            group,
            rows.contexts,
            rows.tokens[:, :NUM_KEPT],
            rows.probs[:, :NUM_KEPT],
            self._now,
        )
        self._now += len(rows.contexts)

    def find(self, group: int, before: int, last: int) -> tuple[IntArray, NDArray[np.float32]]:
        """What was foreseen behind two tokens, or behind the last of them; empty if nothing."""
        for first in (before, self._kernels.NO_CONTEXT):
            slot = self._kernels.find_context(
                self._keys, self._kernels.context_key(group, first, last)
            )
            if slot >= 0:
                return self._tokens[slot], self._probs[slot]
        return self._tokens[0, :0], self._probs[0, :0]
