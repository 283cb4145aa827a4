# SPDX-License-Identifier: Apache-2.0
"""What a draft learns at each position: the target's distribution, or its token."""

import torch
from torch import Tensor
from torch.nn import functional


def forward_kl(
    logits: Tensor,  # [n, m] float32 of the draft
    wanted: Tensor,  # [n, vocab_size] float32 logits of the target, m <= vocab_size
    top: int = 0,
) -> Tensor:
    """KL(target || draft) of each row, [n], without the target's tokens that the draft lacks.

    Those tokens' part of the distribution is left out of the sum, so a position counts as much as
    the draft could be right there; the sum is then not a divergence and may be negative.

    Args:
        logits: The draft's.
        wanted: The target's.
        top: Keep the target's this many best tokens, and all others as one; 0 = keep all.
    """
    probs = wanted.softmax(-1)[:, : logits.shape[1]]
    if not 0 < top < logits.shape[1]:
        cross = probs.sum(-1) * logits.logsumexp(-1) - (probs * logits).sum(-1)
        return cross - torch.special.entr(probs).sum(-1)
    best, ids = probs.topk(top, dim=-1)
    rest = (probs.sum(-1) - best.sum(-1)).clamp(min=0.0)
    log_q = logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
    log_rest = torch.log1p(-log_q.exp().sum(-1).clamp(max=1.0 - 1e-6))
    entropy = torch.special.entr(best).sum(-1) + torch.special.entr(rest)
    return -(best * log_q).sum(-1) - rest * log_rest - entropy


def answer_loss(
    logits: Tensor,  # [n, m] float32
    tokens: Tensor,  # [n] int64
) -> Tensor:
    """Cross-entropy of each row, [n]; 0 for tokens that the draft lacks."""
    listed = tokens < logits.shape[1]
    found = functional.cross_entropy(logits, torch.where(listed, tokens, 0), reduction="none")
    return torch.where(listed, found, 0.0)
