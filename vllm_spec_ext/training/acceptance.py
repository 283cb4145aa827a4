# SPDX-License-Identifier: Apache-2.0
"""Acceptance by teacher forcing: the text stands for what the target would emit.

That is exact for a greedy chain and text that the target wrote greedily: a drafted token is
accepted only if all before it were right, so the draft has then read the text itself. Lengths count
the bonus token, as vLLM does.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def walk(starts: NDArray[np.int64], accepts: Callable[[int], int]) -> float:
    """Tokens per step when each step moves on by its accepted tokens and the bonus token.

    Args:
        starts: [sequences + 1] rows of each sequence, positions in order.
        accepts: Accepted tokens of a draft made at a row.
    """
    return tokens_per_step(walk_texts(starts, accepts))


def walk_texts(starts: NDArray[np.int64], accepts: Callable[[int], int]) -> NDArray[np.int64]:
    """[sequences, 2] tokens and steps of each sequence; arguments as of :func:`walk`."""
    counts = np.zeros((len(starts) - 1, 2), np.int64)
    for text, (low, high) in enumerate(itertools.pairwise(starts.tolist())):
        row = low
        while row < high:
            emitted = 1 + accepts(row)
            counts[text] += (emitted, 1)
            row += emitted
    return counts


def tokens_per_step(counts: NDArray[np.int64]) -> float:
    """Of some texts' tokens and steps [texts, 2]; nan without a step."""
    tokens, steps = counts.sum(0).tolist()
    return tokens / steps if steps else math.nan


def chain_accepts(
    right: NDArray[np.bool_],  # [n] the greedy token at this position is the text's
    starts: NDArray[np.int64],  # [sequences + 1]
    chain: int,
) -> NDArray[np.int64]:
    """[n] accepted tokens of a chain drafted at each position; a text's end ends its chains."""
    accepted = np.zeros(len(right), np.int64)
    for low, high in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        run = 0
        for row in range(high - 1, low - 1, -1):
            run = run + 1 if right[row] else 0
            accepted[row] = min(run, chain)
    return accepted


def expansion_accepts(
    ranks: NDArray[np.int64],  # [n] of one text: of its tokens among the drafter's, -1 = none
    widths: Sequence[int],  # children of each node, step by step; all 1 = a chain
) -> NDArray[np.int64]:
    """[n] accepted tokens of such a tree drafted at each position."""
    accepted = np.zeros(len(ranks), np.int64)
    alive = np.ones(len(ranks), np.bool_)
    for depth, width in enumerate(widths):
        found = np.zeros(len(ranks), np.bool_)
        ahead = ranks[depth:]
        found[: len(ahead)] = (ahead >= 0) & (ahead < width)
        alive &= found
        accepted += alive
    return accepted


def acceptance_per_position(
    accepted: NDArray[np.int64],  # [n]
    starts: NDArray[np.int64],  # [sequences + 1]
    chain: int,
) -> list[float]:
    """Share of drafts whose first, second, ... token is accepted; drafts cut by an end left out."""
    rows = np.arange(len(accepted))
    ends = np.repeat(starts[1:], np.diff(starts))
    whole = accepted[ends - rows >= chain]
    if not len(whole):
        return [0.0] * chain
    return [round(float((whole > depth).mean()), 4) for depth in range(chain)]
