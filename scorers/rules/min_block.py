# SPDX-License-Identifier: Apache-2.0
"""Minimum-block acceptance: at least ``length`` tokens a step, whatever the target thinks of them.

Stern et al. 2018, section 5.3, whose authors found that it hurts quality; meant for use with
another rule. vLLM always adds one token of the target's own to the accepted ones (recovered or
bonus), so nodes at depth 0 to ``length - 2`` are let through; ``length=1`` is the exact rule. A
draft shorter than ``length - 1``, a stop token, or a token that the request's constraints forbid
ends the block early.

In a tree only the first path is forced: the nodes that each directly follow their parent in the
draft's order, from its first node on. Sampled requests: forced nodes are accepted for certain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spec_ext.scorers.options import MinBlockRule, ScorerOptions
from vllm_spec_ext.scorers.rules.base import Verification, per_node


def on_first_path(v: Verification) -> Tensor:
    """[num_nodes] bool: the node belongs to the first path of its request's draft."""
    if v.parents is None or v.num_nodes == 0:
        return torch.ones_like(v.exact_only)
    index = torch.arange(v.num_nodes, device=v.parents.device)
    start = torch.searchsorted(v.request_index.contiguous(), v.request_index)
    position = index - start
    # On the first path the node at position d has depth d and the parent d - 1, and so has every
    # node before it: count the positions that break the run, from the request's start.
    broken = (v.parents != position - 1).to(torch.int64).cumsum(0)
    before = torch.where(start > 0, broken[(start - 1).clamp(min=0)], 0)
    return broken == before


@dataclass(frozen=True)
class MinBlock:
    """The first ``length - 1`` nodes of the first path stand."""

    length: int | Tensor  # tokens a step; tensor: [num_requests] int64
    lossless: ClassVar[bool] = False

    @classmethod
    def of(cls, rule: MinBlockRule, vocab_size: int | None) -> "MinBlock":
        """The rule with its options' parameters."""
        return cls(rule.length)

    def relaxed(self, v: Verification) -> Tensor:
        """[num_nodes] bool: forced by depth."""
        forced = v.depths < per_node(self.length, v, torch.int64) - 1
        return forced & on_first_path(v) & v.free

    def tolerated(self, v: Verification) -> Tensor:
        """[num_nodes] bool: forced by depth, or equal to the target's choice."""
        return self.relaxed(v) | v.matches

    def for_batch(
        self, rules: Sequence[ScorerOptions | None], device: torch.device | str
    ) -> "MinBlock":
        """One length a request; "exact" is 1."""
        values = [
            self.length if r is None else r.length if isinstance(r, MinBlockRule) else 1
            for r in rules
        ]
        return MinBlock(torch.tensor(values, dtype=torch.int64, device=device))
