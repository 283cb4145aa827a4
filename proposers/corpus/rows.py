# SPDX-License-Identifier: Apache-2.0
"""Compiled look-ups in a store. A module of its own because importing numba is slow."""

import numpy as np

from vllm_spec_ext.compiled import kernel
from vllm_spec_ext.proposers.corpus.store import MAX_SUCCESSORS, BaseArrays


@kernel
def find_base_row(base: BaseArrays, w1: int, w2: int) -> int:
    """Row of a context in the store, or -1: index of w1, then binary search of w2."""
    low = int(base.top[w1])
    high = min(int(base.top[w1 + 1]), len(base.w2))
    end = high
    while low < high:
        middle = (low + high) >> 1
        if np.int64(base.w2[middle]) < w2:
            low = middle + 1
        else:
            high = middle
    if low < end and np.int64(base.w2[low]) == w2:
        return low
    return -1


@kernel
def base_entries(base: BaseArrays, row: int) -> tuple[int, int]:
    """Where a row's successors begin and end.

    Clamped, as opening a store does not read every row: damage must not crash the engine.
    """
    low = int(base.off[row])
    return low, min(int(base.off[row + 1]), len(base.tok), low + MAX_SUCCESSORS)
