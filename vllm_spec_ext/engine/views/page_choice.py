# SPDX-License-Identifier: Apache-2.0
"""Which pages suit a query best, by the mean of each page's keys (TriForce, Sun et al. 2024, 4.1).

TriForce chooses for each head. A block table is shared by all heads of a layer, so here one choice
serves a layer: the attention that each head would pay to the means, averaged over heads.
"""

import torch


def choose_pages(
    queries: torch.Tensor,  # [n, num_heads, head_size]
    means: torch.Tensor,  # [n, m, num_kv_heads, head_size]
    is_candidate: torch.Tensor,  # [n, m] bool; at least `count` in each row
    count: int,
) -> torch.Tensor:
    """[n, count] int64: places of the best pages, ascending.

    Args:
        queries: Of one layer, with rotary positions applied, one a request.
        means: Mean keys of the pages that each could choose.
        is_candidate: Which of the m are there.
        count: Pages to choose, in each row.
    """
    num_requests, num_heads, size = queries.shape
    num_kv_heads = means.shape[2]
    grouped = queries.float().view(num_requests, num_kv_heads, num_heads // num_kv_heads, size)
    scores = torch.einsum("nhgd,nmhd->nhgm", grouped, means.float()) / size**0.5
    scores = scores.masked_fill(~is_candidate[:, None, None, :], -torch.inf)
    # Heads differ in scale, so each is normalised before they are put together.
    shares = scores.softmax(dim=-1).mean(dim=(1, 2))
    shares = shares.masked_fill(~is_candidate, -1.0)
    return shares.topk(count, dim=-1).indices.sort(dim=-1).values
