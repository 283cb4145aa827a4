# SPDX-License-Identifier: Apache-2.0
"""Top-k' acceptance: a draft token stands if it is among the target's k' best tokens.

Stern et al. 2018, section 5.1. Ties are resolved as ``torch.argmax`` resolves them (smaller id
first), so k'=1 is exactly the greedy rule. Not lossless for k' >= 2.

Sampled requests: a token among the k' best is accepted for certain (k' >= 2), any other one by the
lossless rule; temperature, top-k and top-p of the request do not move the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spec_ext.scorers.options import ScorerOptions, TopKRule
from vllm_spec_ext.scorers.rules.base import Verification, per_node
from vllm_spec_ext.scorers.rules.ranking import stands


def ranked_within(v: Verification, limits: Tensor, margins: Tensor) -> Tensor:
    """Tolerance by rank and margin, exact where a rule has no say.

    Args:
        v: The batch.
        limits: [num_nodes] int64, how many best tokens are tolerated.
        margins: [num_nodes] float32, nats behind the best token.

    Returns:
        [num_nodes] bool; where the limit is 1 or the margin 0, the exact rule.
    """
    limits = torch.where(v.exact_only | (margins <= 0), 1, limits)
    result = stands(v.logits, v.verifying_rows, v.tokens, limits, margins) & v.known
    if v.sampled is not None:
        result &= ~(v.sampled & (limits <= 1))
    return result


@dataclass(frozen=True)
class TopK:
    """A draft token stands if fewer than ``k`` tokens come before it."""

    k: int | Tensor  # tensor: [num_requests] int64
    lossless: ClassVar[bool] = False

    @classmethod
    def of(cls, rule: TopKRule, vocab_size: int | None) -> "TopK":
        """The rule with its options' parameters."""
        return cls(rule.k)

    def tolerated(self, v: Verification) -> Tensor:
        """[num_nodes] bool: among the k best of the verifying row."""
        margins = per_node(torch.inf, v, torch.float32)
        return ranked_within(v, per_node(self.k, v, torch.int64), margins)

    def relaxed(self, v: Verification) -> Tensor:
        """As ``tolerated``: the best token is always among them."""
        return self.tolerated(v)

    def for_batch(
        self, rules: Sequence[ScorerOptions | None], device: torch.device | str
    ) -> "TopK":
        """One k a request; "exact" is k=1."""
        values = [self.k if r is None else r.k if isinstance(r, TopKRule) else 1 for r in rules]
        return TopK(torch.tensor(values, dtype=torch.int64, device=device))
