# SPDX-License-Identifier: Apache-2.0
"""One registry of rules: a further rule is a scorer, its options and an entry."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor

from vllm_spec_ext.engine.starting.spec_config import MethodSettings
from vllm_spec_ext.errors import RequestOptionError, UnknownNameError, UnsupportedError
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.scorers.build import build_scorer, warm_up
from vllm_spec_ext.scorers.narrow import narrow
from vllm_spec_ext.scorers.options import AnyOfRule, ScorerOptions
from vllm_spec_ext.scorers.parse import parse_rule
from vllm_spec_ext.scorers.registry import RULES, Rule, names
from vllm_spec_ext.scorers.rules.base import Verification, per_node
from vllm_spec_ext.scorers.rules.exact import Exact


class EvenRule(ScorerOptions):
    """A draft token stands if it is even and below a limit; strict at 0."""

    type: Literal["even"] = "even"
    narrowable = ("limit",)

    limit: int = Field(ge=0)
    """Token ids from here on need an exact match."""

    @property
    def is_strict(self) -> bool:
        return self.limit == 0


@dataclass(frozen=True)
class Even:
    """Tolerates even ids."""

    limit: int | Tensor
    lossless: ClassVar[bool] = False

    @classmethod
    def of(cls, rule: EvenRule, vocab_size: int | None) -> "Even":
        return cls(rule.limit)

    def relaxed(self, v: Verification) -> Tensor:
        below = v.tokens < per_node(self.limit, v, torch.int64)
        return below & (v.tokens % 2 == 0) & v.free

    def tolerated(self, v: Verification) -> Tensor:
        return self.relaxed(v) | v.matches

    def for_batch(
        self, rules: Sequence[ScorerOptions | None], device: torch.device | str
    ) -> "Even":
        used = [
            self.limit if r is None else r.limit if isinstance(r, EvenRule) else 0 for r in rules
        ]
        return Even(torch.tensor(used, dtype=torch.int64, device=device))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "even", Rule(EvenRule, f"{__name__}:Even"))


def batch() -> Verification:
    """Tokens 0 to 5 of one request; the target would choose 3."""
    nodes = torch.arange(6)
    return Verification(
        logits=torch.eye(6)[[3] * 6],
        draft_token_ids=nodes,
        depths=nodes,
        request_index=nodes * 0,
        exact_only=nodes < 0,
    )


def test_a_further_rule_is_parsed_built_and_run() -> None:
    assert "even" in names()
    with pytest.raises(UnknownNameError, match="even"):
        parse_rule("evem")
    rule = parse_rule({"type": "even", "limit": 5})
    assert not rule.is_strict
    with pytest.raises(UnsupportedError, match="scorer even changes the output"):
        build_scorer(rule)
    scorer = build_scorer(rule, allow_lossy=True)
    assert scorer == Even(5)
    warm_up(scorer)
    assert scorer.tolerated(batch()).tolist() == [True, False, True, True, True, False]
    assert build_scorer(parse_rule({"type": "even", "limit": 0})) == Exact()


def test_a_request_may_narrow_a_further_rule() -> None:
    server = parse_rule({"type": "even", "limit": 5})
    own = narrow(server, {"limit": 2})
    with pytest.raises(RequestOptionError, match="at most 5"):
        narrow(server, {"limit": 6})
    scorer = build_scorer(server, allow_lossy=True).for_batch([own], "cpu")
    assert scorer.tolerated(batch()).tolist() == [True, False, False, True, False, False]


def test_a_further_rule_in_a_union() -> None:
    rule = parse_rule(
        {"type": "any_of", "rules": [{"type": "even", "limit": 3}, {"type": "top_k", "k": 2}]}
    )
    assert isinstance(rule, AnyOfRule)
    own = narrow(rule, {"rules": ["exact", None]})
    assert own.model_dump()["rules"][1] == {"type": "top_k", "k": 2}
    # The smaller of equal ids is the second best: 0.
    scorer = build_scorer(rule, allow_lossy=True)
    assert scorer.tolerated(batch()).tolist() == [True, False, True, True, False, False]
    narrowed = scorer.for_batch([own], "cpu")
    assert narrowed.tolerated(batch()).tolist() == [True, False, False, True, False, False]


@pytest.mark.parametrize("name", names())
def test_entries_agree_with_what_they_point_to(name: str) -> None:
    rule = RULES[name]
    assert rule.options.model_fields["type"].default == name
    assert set(rule.options.narrowable) <= set(rule.options.model_fields)
    assert callable(rule.load_scorer().of)


def test_settings_keep_a_rules_parameters() -> None:
    """The engine's configuration is hashed and shown by what it dumps."""
    given = {"type": "any_of", "rules": [{"type": "top_k", "k": 2}, {"type": "even", "limit": 4}]}
    settings = MethodSettings(method="m", options=MethodOptions(), rule=parse_rule(given))
    assert settings.model_dump(mode="json")["rule"] == given


def test_rules_are_read_without_torch_or_numba() -> None:
    code = (
        "import sys\n"
        "from vllm_spec_ext.scorers.narrow import narrow\n"
        "assert not {'torch', 'numba'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
