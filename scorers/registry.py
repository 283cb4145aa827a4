# SPDX-License-Identifier: Apache-2.0
"""All acceptance rules: their options, and where their scorers are. Loads no scorer.

A further rule is a module in ``rules/``, an options class in ``options.py`` and a line here.
"""

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_spec_ext.scorers.options import (
    AnyOfRule,
    DistanceRule,
    ExactRule,
    MinBlockRule,
    ScorerOptions,
    ToleranceRule,
    TopKRule,
)

if TYPE_CHECKING:
    from vllm_spec_ext.scorers.rules.base import Scorer


@dataclass(frozen=True)
class Rule:
    """A rule's entry."""

    options: type[ScorerOptions]
    scorer: str  # "module:Class", a Scorer

    def load_scorer(self) -> "type[Scorer]":
        """Its scorer class; loads torch and numba."""
        found: type[Scorer] = pkgutil.resolve_name(self.scorer)
        return found


_RULES = "vllm_spec_ext.scorers.rules"
RULES = {
    "exact": Rule(ExactRule, f"{_RULES}.exact:Exact"),
    "top_k": Rule(TopKRule, f"{_RULES}.top_k:TopK"),
    "distance": Rule(DistanceRule, f"{_RULES}.distance:Distance"),
    "min_block": Rule(MinBlockRule, f"{_RULES}.min_block:MinBlock"),
    "tolerance": Rule(ToleranceRule, f"{_RULES}.tolerance:Tolerance"),
    "any_of": Rule(AnyOfRule, f"{_RULES}.any_of:AnyOf"),
}
"""``type`` -> the rule."""


def names() -> list[str]:
    """All rules that can be asked for."""
    return list(RULES)
