# SPDX-License-Identifier: Apache-2.0
"""Acceptance of chains by the target's own draws, on the device."""

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
    places = starts[:-1, None] + torch.arange(num_drafted + 1, device=starts.device)
    exists = places < starts[1:, None]
    places = places.clamp(max=sampled.shape[0] - 1).long()
    tokens = sampled[places]
    agrees = (drafted[places][:, 1:] == tokens[:, :-1]) & exists[:, 1:]
    accepted = agrees.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)
    return tokens, accepted + 1
