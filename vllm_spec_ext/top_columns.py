# SPDX-License-Identifier: Apache-2.0
"""The largest of many columns; on a CPU several times as fast as ``topk`` over a vocabulary."""

import numpy as np
import torch

from vllm_spec_ext.compiled import kernel

_WIDTH = 64  # columns of a chunk
_LANES = 256  # chunks of a loop: one has every 256th column, so that all are looked at side by side
_MOST_ON_ONE_CORE = 32 * 65536  # entries; more are quicker in torch, on all cores
_LOG2_E = np.float32(1.4426950408889634)
_MOST_HALVINGS = np.float32(-126.0)  # what is smaller is no normal number, and adds nothing
_MANTISSA, _BIAS = np.float32(2.0**23), np.float32(127.0)
# 2**x for x from 0 to 1, as near to it as float32 can say: Chebyshev's polynomial.
_C0, _C1, _C2 = np.float32(1.0), np.float32(0.6931468), np.float32(0.2402311)
_C3, _C4 = np.float32(0.05547891), np.float32(0.009686188)
_C5, _C6 = np.float32(0.001238241), np.float32(0.00021871255)


def top_log_probs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each row; all where there are fewer.

    On a CPU in two passes over the logits. ``log_softmax`` would write as many numbers, into memory
    that the system hands out anew for each call; ``logsumexp`` takes seven times as long as it on
    some CPUs.

    Args:
        logits: [..., vocab], floating point; not modified.
        count: Of tokens, >= 1.

    Returns:
        [..., count] float32 log-probabilities, and [..., count] int64 tokens, likeliest first. Of
        tokens that are as likely any may be chosen.
    """
    if logits.device.type != "cpu" or logits.numel() > _MOST_ON_ONE_CORE:
        return top_columns(logits.log_softmax(dim=-1, dtype=torch.float32), count)
    rows = logits.detach().flatten(0, -2).to(torch.float32).contiguous()
    values, tokens = top_columns(rows, count)
    totals = torch.empty(len(rows), 1)
    _sum_exponentials(rows.numpy(), values.numpy(), totals.numpy())
    values = (values - values[:, :1]) - totals.log()  # not of their sum, which is rounded more
    shape = *logits.shape[:-1], values.shape[1]
    return values.view(shape), tokens.view(shape)


def top_columns(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest entries of each row, largest first; all where there are fewer.

    The n largest entries lie in the n chunks of columns whose largest entries are largest, so a
    maximum of each chunk is all that is taken of most columns.

    Args:
        scores: [..., num_columns], floating point; not modified.
        count: Of entries, >= 1.

    Returns:
        [..., count] values, and [..., count] int64 columns. Of equal entries any may be chosen, as
        by ``topk``.
    """
    count = min(count, scores.shape[-1])
    rows = scores.flatten(0, -2)
    if _suits_one_core(rows):
        values, columns = _on_one_core(rows, count)
    elif count == 1:
        values, columns = rows.max(dim=-1, keepdim=True)
    elif rows.shape[-1] // _WIDTH <= 2 * count:
        values, columns = rows.topk(count, dim=-1)
    else:
        values, columns = _by_chunks(rows, count)
    shape = *scores.shape[:-1], count
    return values.view(shape), columns.view(shape)


def _by_chunks(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = scores.shape[-1] // _WIDTH * _WIDTH
    chunks = scores[:, :whole].unflatten(-1, (-1, _WIDTH))
    best = chunks.amax(dim=-1).topk(count, dim=-1).indices
    candidates = chunks.gather(1, best.unsqueeze(-1).expand(-1, -1, _WIDTH)).flatten(1)
    candidates = torch.cat([candidates, scores[:, whole:]], dim=-1)
    values, places = candidates.topk(count, dim=-1)
    chosen = best.gather(1, (places // _WIDTH).clamp(max=count - 1))
    columns = chosen * _WIDTH + places % _WIDTH
    in_rest = places - count * _WIDTH  # of the columns that fill no chunk
    return values, torch.where(in_rest >= 0, whole + in_rest, columns)


def _suits_one_core(scores: torch.Tensor) -> bool:
    """Whether a loop is quicker than the half dozen operations of torch, each for all cores."""
    return (
        scores.device.type == "cpu"
        and scores.dtype == torch.float32
        and scores.is_contiguous()
        and scores.numel() <= _MOST_ON_ONE_CORE
    )


def _on_one_core(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(len(scores), count)
    columns = torch.empty(len(scores), count, dtype=torch.int64)
    _find(scores.detach().numpy(), values.numpy(), columns.numpy())
    return values, columns


@kernel
def _find(scores, values, columns):  # type: ignore[no-untyped-def]
    """Write the largest entries of each row, and of equal ones the first.

    Args:
        scores: [num_rows, num_columns] float32.
        values: [num_rows, count] float32, written.
        columns: [num_rows, count] int64, written.
    """
    num_columns, count = scores.shape[1], values.shape[1]
    lanes = np.empty(_LANES, np.float32)
    for r in range(len(scores)):
        row, best, places = scores[r], values[r], columns[r]
        _fill_maxima(row, lanes)
        # The n largest entries lie in the n chunks whose largest entries are largest.
        least = np.float32(-np.inf)
        if count <= _LANES:
            best[:] = least
            for lane in range(_LANES):
                place = count
                while place > 0 and best[place - 1] < lanes[lane]:
                    if place < count:
                        best[place] = best[place - 1]
                    place -= 1
                if place < count:
                    best[place] = lanes[lane]
            least = best[count - 1]
        num_found = 0
        for lane in range(_LANES):
            if lanes[lane] < least:
                continue
            for i in range(lane, num_columns, _LANES):
                score = row[i]
                if score < least:
                    continue
                place = num_found if num_found < count else count
                while place > 0 and (
                    best[place - 1] < score or (best[place - 1] == score and places[place - 1] > i)
                ):
                    if place < count:
                        best[place], places[place] = best[place - 1], places[place - 1]
                    place -= 1
                if place < count:
                    best[place], places[place] = score, i
                    num_found += 1


@kernel
def _fill_maxima(row, lanes):  # type: ignore[no-untyped-def]
    """The largest of every 256th entry; what is no number counts for nothing."""
    width = len(lanes)
    whole = len(row) // width * width
    lanes[:] = np.float32(-np.inf)
    for begin in range(0, whole, width):
        part = row[begin : begin + width]
        for lane in range(width):
            lanes[lane] = part[lane] if part[lane] > lanes[lane] else lanes[lane]
    for lane in range(len(row) - whole):
        score = row[whole + lane]
        lanes[lane] = score if score > lanes[lane] else lanes[lane]


@kernel(fastmath={"reassoc"})
def _sum_exponentials(scores, values, totals):  # type: ignore[no-untyped-def]
    """Write the sum of e to the power of what each entry is above the largest one.

    2**x is the product of a number whose exponent's bits are those of the whole part of x, and of
    2 to the power of the rest. The compiler makes eight of them at a time.

    Args:
        scores: [num_rows, num_columns] float32.
        values: [num_rows, n] float32, the first of which is the row's largest.
        totals: [num_rows, 1] float32, written.
    """
    bits = np.empty(_LANES, np.int32)
    powers, rests = bits.view(np.float32), np.empty(_LANES, np.float32)
    for r in range(len(scores)):
        row, largest, total = scores[r], values[r, 0], np.float32(0.0)
        for begin in range(0, len(row), _LANES):
            part = row[begin : begin + _LANES]
            for i in range(len(part)):
                x = (part[i] - largest) * _LOG2_E
                x = _MOST_HALVINGS if x < _MOST_HALVINGS else x  # what is no number stays so
                whole = np.floor(x)
                x -= whole
                bits[i] = np.int32((whole + _BIAS) * _MANTISSA)
                rests[i] = _C0 + x * (_C1 + x * (_C2 + x * (_C3 + x * (_C4 + x * (_C5 + x * _C6)))))
            of_part = np.float32(0.0)
            for i in range(len(part)):
                of_part += powers[i] * rests[i]
            total += of_part
        totals[r, 0] = total


def warm_up() -> None:
    """Compile what a CPU runs (about a second on a cold cache) before the first request."""
    top_log_probs(torch.zeros(1, _WIDTH), 1)
