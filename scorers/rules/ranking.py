# SPDX-License-Identifier: Apache-2.0
"""Where a draft token stands among the target's logits, without sorting the vocabulary.

On the CPU one compiled pass reads a row in blocks and leaves it as soon as the answer is known;
most wrong drafts fall in the first block. A sort or a softmax over the same rows costs 10 to 50
times as much. On other devices the same definitions run as two plain tensor reductions.

Order of tokens: larger logit first, smaller id first among equal logits, NaN before everything.
That is the order of ``torch.argmax``, so "among the best 1" is the greedy choice.
"""

import numpy as np
import torch
from torch import Tensor

from vllm_spec_ext.compiled import kernel

# Small enough that a decision comes early, large enough that the inner loop is vectorised.
BLOCK = 2048


@kernel
def _num_not_below(block, value):  # type: ignore[no-untyped-def]
    count = 0
    for j in range(block.shape[0]):
        count += not (block[j] < value)
    return count


@kernel
def _num_above(block, value):  # type: ignore[no-untyped-def]
    count = 0
    for j in range(block.shape[0]):
        count += not (block[j] <= value)
    return count


@kernel
def _exceeds(block, value, margin):  # type: ignore[no-untyped-def]
    exceeds = False
    for j in range(block.shape[0]):
        exceeds |= not (block[j] - value <= margin)
    return exceeds


@kernel
def _stands(row, token, limit, margin):  # type: ignore[no-untyped-def]
    value = row[token]
    if not value > -float("inf") or limit < 1:
        return False
    num_ahead = 0
    start = 0
    while start < row.shape[0]:
        stop = min(start + BLOCK, row.shape[0])
        if start < token:
            stop = min(stop, token)  # ids below the token win ties, ids above lose them
            count = _num_not_below(row[start:stop], value)
        else:
            count = _num_above(row[start:stop], value)
        if count > 0:
            num_ahead += count
            if num_ahead >= limit or _exceeds(row[start:stop], value, margin):
                return False
        start = stop
    return True


@kernel
def _all_stand(  # type: ignore[no-untyped-def]
    logits, rows, tokens, limits, margins, out
):
    for i in range(tokens.shape[0]):
        out[i] = _stands(logits[rows[i]], tokens[i], limits[i], margins[i])


@kernel
def _first_equal(logits, values, positions):  # type: ignore[no-untyped-def]
    """Move each position on to the first entry of its row that is the value (or NaN, if it is)."""
    for i in range(logits.shape[0]):
        value = values[i]
        for j in range(positions[i], logits.shape[1]):
            found = logits[i, j]
            if found == value or (np.isnan(found) and np.isnan(value)):
                positions[i] = j
                break


def stands(
    logits: Tensor,  # [num_rows, vocab] float32
    rows: Tensor,  # [num_nodes] int64
    tokens: Tensor,  # [num_nodes] int64, valid ids
    limits: Tensor,  # [num_nodes] int64
    margins: Tensor,  # [num_nodes] float32, nats; inf = no margin
) -> Tensor:
    """Which tokens are among the best ``limit`` of their row and within ``margin`` of its best.

    The margin is compared as ``best - own <= margin`` in float32. A token at ``-inf`` or NaN never
    stands, nor does any with a limit below 1.

    Returns:
        [num_nodes] bool.
    """
    assert logits.dtype == torch.float32
    if logits.device.type == "cpu":
        out = torch.zeros(tokens.shape[0], dtype=torch.bool)
        _all_stand(
            logits.detach().numpy(),
            rows.numpy(),
            tokens.numpy(),
            limits.numpy(),
            margins.numpy(),
            out.numpy(),
        )
        return out
    return stands_on_device(logits, rows, tokens, limits, margins)


def stands_on_device(
    logits: Tensor, rows: Tensor, tokens: Tensor, limits: Tensor, margins: Tensor
) -> Tensor:
    """As :func:`stands`, in plain tensor operations (no host synchronisation)."""
    verifying = logits[rows]
    own = verifying.gather(1, tokens[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    # Written as negations so that NaN logits count as ahead, as in torch.argmax.
    ahead = ~(verifying <= own) | ((verifying == own) & (ids < tokens[:, None]))
    near = verifying.amax(dim=1) - own[:, 0] <= margins
    first = ahead.sum(dim=1) == 0  # inf - inf is NaN, but the best token needs no margin
    return (ahead.sum(dim=1) < limits) & (near | first) & (own[:, 0] > -torch.inf)


def first_argmax(logits: Tensor) -> Tensor:
    """``logits.argmax(dim=1)``, several times as fast on the CPU.

    torch finds maxima with vector instructions, but positions without them: so the maximum of each
    block is found first, and a position only in the first block that holds the row's maximum.

    Args:
        logits: [num_rows, vocab] float32.

    Returns:
        [num_rows] int64, the smallest id among equal maxima (of a NaN, if the row has any).
    """
    size = logits.shape[1]
    if logits.device.type != "cpu" or size <= BLOCK:
        return logits.argmax(dim=1)
    num_whole = size // BLOCK
    whole = logits[:, : num_whole * BLOCK].unflatten(1, (num_whole, BLOCK)).amax(dim=2)
    # The last block overlaps the one before it; it is only chosen for what stands behind that.
    last = logits[:, size - BLOCK :].amax(dim=1, keepdim=True)
    maxima = torch.cat([whole, last], dim=1)
    block = maxima.argmax(dim=1)
    start = (block * BLOCK).clamp(max=size - BLOCK)
    _first_equal(logits.detach().numpy(), maxima.amax(dim=1).numpy(), start.numpy())
    return start
