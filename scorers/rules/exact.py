# SPDX-License-Identifier: Apache-2.0
"""Exact acceptance: a draft token stands only if the target itself would have put it there.

Greedy requests: the draft token is the target's argmax. Sampled requests: nothing is tolerated, so
the lossless sampling rule decides alone. (Stern et al. 2018, section 3: the default criterion.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spec_ext.scorers.options import ScorerOptions
from vllm_spec_ext.scorers.rules.base import Verification


@dataclass(frozen=True)
class Exact:
    """The lossless rule; the engine's own kernels implement it, so it need not even be run."""

    lossless: ClassVar[bool] = True

    @classmethod
    def of(cls, rule: ScorerOptions, vocab_size: int | None) -> "Exact":
        """The rule with its options' parameters."""
        return cls()

    def relaxed(self, v: Verification) -> Tensor:
        """[num_nodes] bool: none."""
        return torch.zeros_like(v.exact_only)

    def tolerated(self, v: Verification) -> Tensor:
        """[num_nodes] bool: greedy and equal to the target's argmax."""
        return v.matches

    def for_batch(
        self, rules: Sequence[ScorerOptions | None], device: torch.device | str
    ) -> "Exact":
        """Itself: nothing is stricter."""
        return self
