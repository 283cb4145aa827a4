# SPDX-License-Identifier: Apache-2.0
"""The likeliest tokens of one row of logits on a CPU, in two passes over it.

A softmax and a search by torch write as much as they read, and start a dozen operators that find
the caches cold after a pass of the model.
"""

import math

import numpy as np

from vllm_spec_ext.compiled import kernel

WIDTH = 64  # columns of a chunk; enough for the loops over one to be vectorised

# The order of sums and maxima is free, and there is no NaN; infinities are heeded.
_FREE_ORDER = {"nnan", "nsz", "reassoc", "contract"}
_LOG2_E = np.float32(math.log2(math.e))
_LEAST = np.float32(-126.0)  # binary exponent below which a float32 is 0, or as good as


@kernel(fastmath=_FREE_ORDER)
def _best_of_chunks(row, best):  # type: ignore[no-untyped-def]
    for chunk in range(best.shape[0]):
        largest = row[chunk * WIDTH]
        for i in range(1, WIDTH):
            largest = max(largest, row[chunk * WIDTH + i])
        best[chunk] = largest


@kernel(fastmath=_FREE_ORDER)
def _sum_of_powers(row, best):  # type: ignore[no-untyped-def]
    """Sum of ``exp(row - best)``; each term is right to some 2e-7 of it.

    ``2**x = 2**floor(x) * 2**(x - floor(x))``: the first is written as the bits of a float, the
    second is a polynomial (least maximum relative error on [0, 1], degree 5).
    """
    whole = row.shape[0] // WIDTH * WIDTH
    bits = np.empty(WIDTH, np.int32)
    powers = bits.view(np.float32)
    rest = np.empty(WIDTH, np.float32)
    sums = np.zeros(WIDTH, np.float32)
    for start in range(0, whole, WIDTH):
        for i in range(WIDTH):
            x = max((row[start + i] - best) * _LOG2_E, _LEAST)
            floor = np.int32(x) - np.int32(x < 0)
            rest[i] = x - np.float32(floor)
            bits[i] = (floor + np.int32(127)) << np.int32(23)
        for i in range(WIDTH):
            f = rest[i]
            p = np.float32(1.8775767e-3)
            p = p * f + np.float32(8.9893397e-3)
            p = p * f + np.float32(5.5826318e-2)
            p = p * f + np.float32(2.4015361e-1)
            p = p * f + np.float32(6.9315308e-1)
            p = p * f + np.float32(9.9999994e-1)
            sums[i] += p * powers[i]
    total = np.float32(0.0)
    for i in range(WIDTH):
        total += sums[i]
    for i in range(whole, row.shape[0]):
        total += np.float32(math.exp(row[i] - best))
    return total


@kernel
def _insert(value, place, values, places):  # type: ignore[no-untyped-def]
    """Into the largest so far, largest first; the smallest of them falls out."""
    i = values.shape[0] - 1
    while i > 0 and values[i - 1] < value:
        values[i], places[i] = values[i - 1], places[i - 1]
        i -= 1
    values[i], places[i] = value, place


@kernel
def likeliest_of_row(row, tokens, probs):  # type: ignore[no-untyped-def]
    """The likeliest tokens of a row and their probabilities, likeliest first.

    The n largest entries lie in the n chunks whose largest entries are largest.

    Args:
        row: [vocab] float32 logits; at least as many chunks of WIDTH as there are `tokens`.
        tokens: [n] int32; written to.
        probs: [n] float32; written to.
    """
    count = tokens.shape[0]
    best = np.empty(row.shape[0] // WIDTH, np.float32)
    _best_of_chunks(row, best)
    chunk_values = np.full(count, -np.inf, np.float32)
    chunks = np.zeros(count, np.int32)
    for chunk in range(best.shape[0]):
        if best[chunk] > chunk_values[count - 1]:
            _insert(best[chunk], np.int32(chunk), chunk_values, chunks)
    values = np.full(count, -np.inf, np.float32)
    tokens[:] = 0
    for i in range(count + 1):
        # The last one is what fills no chunk. A chunk below -inf is no chunk.
        start = chunks[i] * WIDTH if i < count else best.shape[0] * WIDTH
        end = start + WIDTH if i < count else row.shape[0]
        if i < count and chunk_values[i] == -np.inf:
            continue
        for place in range(start, end):
            if row[place] > values[count - 1]:
                _insert(row[place], np.int32(place), values, tokens)
    total = _sum_of_powers(row, values[0])
    for i in range(count):
        probs[i] = min(np.float32(math.exp(values[i] - values[0])) / total, np.float32(1.0))


def warm_up() -> None:
    """Compile it (some seconds on a cold cache) before the first request."""
    likeliest_of_row(np.zeros(WIDTH, np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32))
