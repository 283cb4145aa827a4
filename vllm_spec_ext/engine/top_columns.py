# SPDX-License-Identifier: Apache-2.0
"""The largest of many columns; several times as fast as ``topk`` over a vocabulary on a CPU."""

import torch

_WIDTH = 64  # columns of a chunk


def top_columns(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest entries of each row, largest first; all where there are fewer.

    The n largest entries lie in the n chunks of columns whose largest entries are largest, so a
    maximum of each chunk is all that is taken of most columns.

    Args:
        scores: [num_rows, num_columns], floating point; not modified.
        count: Of entries, >= 1.

    Returns:
        [num_rows, count] values, and [num_rows, count] int64 columns. Of equal entries any may be
        chosen, as by ``topk``.
    """
    num_columns = scores.shape[-1]
    whole = num_columns // _WIDTH * _WIDTH
    if whole // _WIDTH <= 2 * count:
        return scores.topk(min(count, num_columns), dim=-1)
    chunks = scores[:, :whole].unflatten(-1, (-1, _WIDTH))
    best = chunks.amax(dim=-1).topk(count, dim=-1).indices
    candidates = chunks.gather(1, best.unsqueeze(-1).expand(-1, -1, _WIDTH)).flatten(1)
    candidates = torch.cat([candidates, scores[:, whole:]], dim=-1)
    values, places = candidates.topk(count, dim=-1)
    chosen = best.gather(1, (places // _WIDTH).clamp(max=count - 1))
    columns = chosen * _WIDTH + places % _WIDTH
    in_rest = places - count * _WIDTH  # of the columns that fill no chunk
    return values, torch.where(in_rest >= 0, whole + in_rest, columns)
