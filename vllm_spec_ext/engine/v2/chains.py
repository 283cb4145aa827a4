# SPDX-License-Identifier: Apache-2.0
"""Acceptance of chains by the target's own draws, on the device."""

from functools import lru_cache

import torch


def follow_chains(
    sampled: torch.Tensor,  # [num_rows] the target's draw at each row
    drafted: torch.Tensor,  # [num_rows] the row's own token; below 0: not a draft
    starts: torch.Tensor,  # [num_reqs + 1] first row of each request
    num_drafted: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept each chain as far as the draws agree with it; no waiting for the device.

    Args:
        sampled: int64.
        drafted: Integers.
        starts: int32.
        num_drafted: Most draft tokens of a request.

    Returns:
        ``(tokens, num_sampled)``: [num_reqs, num_drafted + 1] int64, of which the first
        [num_reqs] int32 of each row count.
    """
    num_reqs, width = starts.shape[0] - 1, num_drafted + 1
    counts, all_of_them, offsets = _counts(num_drafted, sampled.device)
    if sampled.shape[0] == num_reqs * width:  # all chains are full, and stand as in a matrix
        # Each operation takes its time on the host: in one what would be a view and a slice of it.
        inner = (num_reqs, num_drafted), (width, 1)
        tokens = sampled.view(num_reqs, width)
        agrees = drafted.as_strided(*inner, drafted.storage_offset() + 1) == sampled.as_strided(
            *inner, sampled.storage_offset()
        )
    else:
        places = starts[:-1, None] + offsets
        is_missing = places >= starts[1:, None]
        places.clamp_(max=sampled.shape[0] - 1)
        tokens = sampled[places]
        drafted = drafted[places].masked_fill_(is_missing, -1)
        agrees = drafted[:, 1:] == tokens[:, :-1]
    return tokens, torch.where(agrees, all_of_them, counts).amin(dim=1)


@lru_cache(maxsize=8)
def _counts(
    num_drafted: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of a chain that ends at each draft, of one that does not end, and 0 to so many."""
    offsets = torch.arange(num_drafted + 1, dtype=torch.int32, device=device)
    return offsets[1:], torch.tensor(num_drafted + 1, dtype=torch.int32, device=device), offsets
