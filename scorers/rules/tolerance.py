# SPDX-License-Identifier: Apache-2.0
"""GAD++ acceptance: among the ``beta`` best tokens and at most ``tau`` nats behind the best one.

Xia et al. 2022 (generalized aggressive decoding), equations 8 and 9: ``log P(draft) >= log P(rank
beta)`` and ``log P(top 1) - log P(draft) <= tau``. Both are differences of log-probabilities of one
row, so the normaliser cancels and raw logits give the same answer. They are the *untempered*
logits: tau means the same at every temperature. beta=1 or tau=0 is GAD, the exact rule.

Ties at rank beta are cut by token id (as argmax does): at most ``beta`` tokens are tolerated.
Sampled requests: a tolerated token is accepted for certain, any other one by the lossless rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spec_ext.scorers.options import ScorerOptions, ToleranceRule
from vllm_spec_ext.scorers.rules.base import Verification, per_node
from vllm_spec_ext.scorers.rules.top_k import ranked_within


@dataclass(frozen=True)
class Tolerance:
    """Rank at most ``beta`` and gap at most ``tau``."""

    beta: int | Tensor  # tensor: [num_requests] int64
    tau: float | Tensor  # nats; tensor: [num_requests] float32
    lossless: ClassVar[bool] = False

    @classmethod
    def of(cls, rule: ToleranceRule, vocab_size: int | None) -> "Tolerance":
        """The rule with its options' parameters."""
        return cls(rule.beta, rule.tau)

    def tolerated(self, v: Verification) -> Tensor:
        """[num_nodes] bool: near enough to the best token of the verifying row."""
        return ranked_within(
            v, per_node(self.beta, v, torch.int64), per_node(self.tau, v, torch.float32)
        )

    def relaxed(self, v: Verification) -> Tensor:
        """As ``tolerated``: the best token is always among them."""
        return self.tolerated(v)

    def for_batch(
        self, rules: Sequence[ScorerOptions | None], device: torch.device | str
    ) -> "Tolerance":
        """One (beta, tau) a request; "exact" is (1, 0)."""
        own = (self.beta, self.tau)
        used = [
            own if r is None else (r.beta, r.tau) if isinstance(r, ToleranceRule) else (1, 0.0)
            for r in rules
        ]
        return Tolerance(
            torch.tensor([beta for beta, _ in used], dtype=torch.int64, device=device),
            torch.tensor([tau for _, tau in used], dtype=torch.float32, device=device),
        )
