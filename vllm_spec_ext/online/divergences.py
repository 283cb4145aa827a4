# SPDX-License-Identifier: Apache-2.0
"""Divergences between target and drafter over the target's likeliest tokens, all others as one.

The target's distribution is known at its m likeliest tokens and as the sum of the rest. Both
distributions are compared on these m + 1 outcomes; by the data-processing inequality this is a
lower bound of the divergence over all tokens. Tokens that the drafter cannot draft are left out,
and a position counts as much as the drafter could be right there.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Loss = Literal["forward", "reverse", "jensen_shannon"]
NEVER = -40.0
"""Logarithm of a probability that counts as zero."""

_TINY = 1e-7


def outcomes(
    log_q: Tensor,  # [n, v] log-probabilities of the drafter
    places: Tensor,  # [n, m] int64 columns of the target's likeliest tokens; -1 = not drafted
    probs: Tensor,  # [n, m] the target's probabilities of these
    tails: Tensor,  # [n] and of all other tokens together
) -> tuple[Tensor, Tensor, Tensor]:
    """Both distributions over m + 1 outcomes.

    approximation: the tail counts as draftable, as which tokens it is of was not recorded.

    Returns:
        Logarithms of the target's [n, m + 1], renormalised to what can be drafted, and of the
        drafter's [n, m + 1], both :data:`NEVER` for tokens that cannot be drafted; and the share of
        the target [n] that can be.
    """
    listed = places >= 0
    p = torch.cat([torch.where(listed, probs, 0.0), tails[:, None]], dim=1)
    share = p.sum(1)
    log_p = (p / share.clamp(min=_TINY)[:, None]).log().clamp(min=NEVER)
    found = log_q.gather(1, places.clamp(min=0))
    rest = 1.0 - (found.exp() * listed).sum(1, keepdim=True)
    found = torch.where(listed, found, NEVER)
    return log_p, torch.cat([found, rest.clamp(min=_TINY).log()], dim=1), share


def divergence(kind: Loss, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Of each row, [n].

    Args:
        kind: ``forward`` = KL(p || q), ``reverse`` = KL(q || p), ``jensen_shannon`` = the mean of
            both KL(. || m) to m = (p + q) / 2.
        log_p: [n, k] the target's.
        log_q: [n, k] the drafter's, with a gradient.
    """
    if kind == "forward":
        return _kl(log_p, log_q)
    if kind == "reverse":
        return _kl(log_q, log_p)
    middle = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return (_kl(log_p, middle) + _kl(log_q, middle)) / 2


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Chance that a token drawn from q is accepted by speculative sampling, [n]: sum of min(p, q).

    Of all outcomes, not of the drafted one, whose mean would be another number unless both are
    nearly greedy. An upper bound, as outcomes that are many tokens count as one.
    """
    return torch.minimum(log_p, log_q).exp().sum(-1)


def _kl(log_one: Tensor, log_other: Tensor) -> Tensor:
    return (log_one.exp() * (log_one - log_other)).sum(-1)
