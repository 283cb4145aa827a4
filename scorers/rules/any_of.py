# SPDX-License-Identifier: Apache-2.0
"""Union of rules: a draft token stands if any of them tolerates it.

For instance a minimum block with top-k' behind it. There is no intersection on purpose: a rule made
stricter by another one is better said by its own parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spec_ext.scorers.build import scorer_of
from vllm_spec_ext.scorers.options import AnyOfRule, ScorerOptions
from vllm_spec_ext.scorers.rules.base import Scorer, Verification
from vllm_spec_ext.scorers.rules.exact import Exact
from vllm_spec_ext.scorers.rules.min_block import MinBlock


@dataclass(frozen=True)
class AnyOf:
    """The union of two or more relaxed rules."""

    scorers: tuple[Scorer, ...]
    lossless: ClassVar[bool] = False

    @classmethod
    def of(cls, rule: AnyOfRule, vocab_size: int | None) -> "AnyOf":
        """The rule with its options' parameters."""
        return cls(tuple(scorer_of(member, vocab_size) for member in rule.rules))

    def relaxed(self, v: Verification) -> Tensor:
        """[num_nodes] bool: tolerated by at least one rule, exact matches perhaps left out."""
        return reduce(torch.logical_or, (scorer.relaxed(v) for scorer in self.scorers))

    def tolerated(self, v: Verification) -> Tensor:
        """[num_nodes] bool: tolerated by at least one rule."""
        # One member with its exact matches is enough, and ranking rules have them at no extra cost.
        full = min(self.scorers, key=lambda scorer: isinstance(scorer, MinBlock | Exact))
        masks = (s.tolerated(v) if s is full else s.relaxed(v) for s in self.scorers)
        return reduce(torch.logical_or, masks)

    def for_batch(
        self, rules: Sequence[ScorerOptions | None], device: torch.device | str
    ) -> "AnyOf":
        """Each member with its own parameters a request; "exact" is exact for all members."""
        members = []
        for index, scorer in enumerate(self.scorers):
            own = [r.rules[index] if isinstance(r, AnyOfRule) else r for r in rules]
            members.append(scorer.for_batch(own, device))
        return AnyOf(tuple(members))
