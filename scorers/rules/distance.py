# SPDX-License-Identifier: Apache-2.0
"""Distance acceptance: a draft token stands if it lies within ``epsilon`` of the target's argmax.

Stern et al. 2018, section 5.2, for vocabularies with a metric (pixel intensities: epsilon=2). The
metric is the difference of token ids, or the user's: a matrix ``[target, draft]``, one value a
token, or a function. epsilon=0 is the exact rule whatever the metric says; a matrix that calls
different tokens equal needs an epsilon above 0. NaN is further than any epsilon.

Sampled requests: a token near the *argmax* is accepted for certain, any other one by the lossless
rule; the drawn token plays no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spec_ext.scorers.options import DistanceRule, ScorerOptions
from vllm_spec_ext.scorers.rules.base import Verification, per_node
from vllm_spec_ext.scorers.rules.distance_table import Metric, load_metric


def id_distance(target: Tensor, draft: Tensor) -> Tensor:
    """[n] float32: how far two token ids are apart."""
    return (target - draft).abs().to(torch.float32)


@dataclass(frozen=True)
class Distance:
    """Within ``epsilon`` of the target's choice."""

    epsilon: float | Tensor  # tensor: [num_requests] float32
    metric: Metric = id_distance
    lossless: ClassVar[bool] = False

    @classmethod
    def of(cls, rule: DistanceRule, vocab_size: int | None) -> "Distance":
        """The rule with its options' parameters."""
        metric = id_distance if rule.table is None else load_metric(rule.table, vocab_size)
        return cls(rule.epsilon, metric)

    def relaxed(self, v: Verification) -> Tensor:
        """[num_nodes] bool: near the target's choice."""
        epsilon = per_node(self.epsilon, v, torch.float32)
        near = self.metric(v.choice, v.tokens) <= epsilon
        return near & (epsilon > 0) & v.free

    def tolerated(self, v: Verification) -> Tensor:
        """[num_nodes] bool: near the target's choice, or equal to it."""
        exact = (v.draft_token_ids == v.choice) & (v.draft_logits > -torch.inf)
        if v.sampled is not None:
            exact &= ~v.sampled
        return self.relaxed(v) | exact

    def for_batch(
        self, rules: Sequence[ScorerOptions | None], device: torch.device | str
    ) -> "Distance":
        """One epsilon a request; "exact" is 0."""
        values = [
            self.epsilon if r is None else r.epsilon if isinstance(r, DistanceRule) else 0.0
            for r in rules
        ]
        return Distance(torch.tensor(values, dtype=torch.float32, device=device), self.metric)
