# SPDX-License-Identifier: Apache-2.0
"""The largest of many columns; on a CPU several times as fast as ``topk`` over a vocabulary."""

import numpy as np
import torch

from vllm_spec_ext.compiled import kernel

_WIDTH = 64  # columns of a chunk
_MOST_ON_ONE_CORE = 4 * 65536  # entries; more are quicker in torch, on all cores


def top_log_probs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each row; all where there are fewer.

    ``log_softmax`` goes over all columns, as ``logsumexp`` does, which takes seven times as long on
    some CPUs.

    Args:
        logits: [..., vocab], floating point; not modified.
        count: Of tokens, >= 1.

    Returns:
        [..., count] float32 log-probabilities, and [..., count] int64 tokens, likeliest first. Of
        tokens that are as likely any may be chosen.
    """
    return top_columns(logits.log_softmax(dim=-1, dtype=torch.float32), count)


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
    for r in range(len(scores)):
        row, best, places = scores[r], values[r], columns[r]
        num_found, least = 0, np.float32(-np.inf)
        for begin in range(0, num_columns, _WIDTH):
            end = min(begin + _WIDTH, num_columns)
            largest = row[begin]
            for i in range(begin + 1, end):
                largest = max(largest, row[i])
            if largest <= least and num_found >= count:
                continue
            for i in range(begin, end):
                score = row[i]
                if score <= least and num_found >= count:
                    continue
                place = min(num_found, count - 1)
                while place > 0 and best[place - 1] < score:
                    best[place], places[place] = best[place - 1], places[place - 1]
                    place -= 1
                best[place], places[place] = score, i
                num_found += 1
                if num_found >= count:
                    least = best[count - 1]


def warm_up() -> None:
    """Compile what a CPU runs (about a second on a cold cache) before the first request."""
    top_columns(torch.zeros(1, _WIDTH), 1)
