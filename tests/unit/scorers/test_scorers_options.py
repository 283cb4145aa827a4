# SPDX-License-Identifier: Apache-2.0
"""Parsing, contradictions, per-request narrowing, distance tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from unreadable_files import make_unreadable, said_to_be_unreadable

from vllm_spec_ext.errors import (
    RequestOptionError,
    SpecExtError,
    UnknownNameError,
    UnsupportedError,
)
from vllm_spec_ext.scorers.build import build_scorer
from vllm_spec_ext.scorers.narrow import narrow
from vllm_spec_ext.scorers.options import ExactRule, TopKRule
from vllm_spec_ext.scorers.parse import parse_rule
from vllm_spec_ext.scorers.rules.base import Verification
from vllm_spec_ext.scorers.rules.distance_table import load_metric
from vllm_spec_ext.scorers.rules.exact import Exact
from vllm_spec_ext.scorers.rules.top_k import TopK

TOP_K = {"type": "top_k", "k": 3}
TOLERANCE = {"type": "tolerance", "beta": 3, "tau": 1.0}


def test_lossy_rule_needs_consent() -> None:
    with pytest.raises(UnsupportedError, match="allow_lossy"):
        build_scorer(parse_rule(TOP_K))
    assert build_scorer(parse_rule(TOP_K), allow_lossy=True) == TopK(3)


@pytest.mark.parametrize(
    "given", ["exact", {"type": "top_k", "k": 1}, {"type": "tolerance", "tau": 0}]
)
def test_strict_rules_are_exact_and_need_none(given: Any) -> None:
    assert build_scorer(parse_rule(given)) == Exact()
    assert build_scorer(None) == Exact()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("topk", UnknownNameError, "Did you mean 'top_k'"),
        ({"type": "tolerence"}, UnknownNameError, "Did you mean 'tolerance'"),
        ({"type": "top_k", "kk": 2}, UnknownNameError, "option of scorer top_k"),
        ({"type": ["x"]}, UnknownNameError, "unknown rule"),
        ({"k": 2}, SpecExtError, 'no "type"'),
        (5, SpecExtError, "expected an object"),
        ({"type": "top_k"}, SpecExtError, "k: "),
        ({"type": "top_k", "k": 0}, SpecExtError, "found 0"),
        ({"type": "tolerance", "tau": float("nan")}, SpecExtError, "tau"),
        ({"type": "any_of", "rules": []}, SpecExtError, "rules"),
        ({"type": "any_of", "rules": [{"type": "nope"}]}, UnknownNameError, r"rules\[0\]"),
        (
            {"type": "any_of", "rules": [{"type": "any_of", "rules": [TOP_K]}]},
            SpecExtError,
            "inside",
        ),
    ],
)
def test_bad_rules(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parse_rule(given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"type": "any_of", "rules": [TOP_K]}, "found one rule"),
        ({"type": "any_of", "rules": [TOP_K, {"type": "top_k", "k": 2}]}, "2 times"),
        ({"type": "any_of", "rules": [TOP_K, TOLERANCE]}, "already tolerates"),
        ({"type": "any_of", "rules": [TOP_K, "exact"]}, "the exact rule"),
        ({"type": "top_k", "k": 10}, "vocabulary of 10"),
        ({"type": "min_block", "length": 6}, "at most num_speculative_tokens"),
        ({"type": "distance", "epsilon": 1, "table": "nothing.npy"}, "cannot be read"),
    ],
)
def test_contradictions(given: Any, text: str) -> None:
    with pytest.raises(SpecExtError, match=text):
        build_scorer(parse_rule(given), True, vocab_size=10, num_speculative_tokens=4)


def test_narrowing_to_stricter() -> None:
    server = parse_rule(TOP_K)
    assert narrow(server, None) is server
    assert narrow(server, "exact") == ExactRule()
    assert narrow(server, {"type": "exact"}) == ExactRule()
    assert narrow(server, {"k": 2}) == TopKRule(k=2)
    assert narrow(server, {"type": "top_k", "k": 3}) == server
    assert narrow(None, "exact") == ExactRule()
    assert narrow(parse_rule(TOLERANCE), {"tau": 0.5}).model_dump() == {**TOLERANCE, "tau": 0.5}


@pytest.mark.parametrize(
    ("server", "value", "parameter", "text"),
    [
        (TOP_K, {"k": 4}, "scorer.k", "at most 3"),
        (TOLERANCE, {"beta": 1, "tau": 2.0}, "scorer.tau", "at most 1.0"),
        (TOP_K, {"type": "tolerance"}, "scorer", "this server runs 'top_k'"),
        (None, {"type": "top_k", "k": 2}, "scorer", "this server runs 'exact'"),
        (None, {"k": 2}, "scorer", "no parameters"),
        (TOP_K, "top_p", "scorer", "found rule 'top_p'"),
        (TOP_K, {"k": "many"}, "scorer.k", "valid integer"),
        (TOP_K, {"beta": 1}, "scorer.beta", "it may set: k"),
        (TOP_K, 3, "scorer", "found 3"),
        (TOP_K, {"type": "exact", "k": 1}, "scorer", "no parameters"),
        (
            {"type": "distance", "epsilon": 1},
            {"table": "x.npy"},
            "scorer.table",
            "may set: epsilon",
        ),
        (
            {"type": "any_of", "rules": [TOP_K, {"type": "min_block", "length": 2}]},
            {"rules": [None, {"length": 3}]},
            "scorer.rules[1].length",
            "at most 2",
        ),
        (
            {"type": "any_of", "rules": [TOP_K, {"type": "min_block", "length": 2}]},
            {"rules": ["exact"]},
            "scorer",
            "top_k, min_block",
        ),
    ],
)
def test_narrowing_refuses_to_loosen(server: Any, value: Any, parameter: str, text: str) -> None:
    with pytest.raises(RequestOptionError, match=text) as caught:
        narrow(parse_rule(server) if server else None, value)
    assert caught.value.parameter == parameter


def halves(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """A metric for the import test."""
    return (target - draft).abs() / 2


def test_metrics_from_files_and_functions(tmp_path: Path) -> None:
    target, draft = torch.tensor([0, 1, 2]), torch.tensor([2, 1, 0])
    matrix = np.arange(9).reshape(3, 3)
    np.save(tmp_path / "m.npy", matrix)
    save_file({"values": torch.tensor([0.0, 1.0, 5.0])}, tmp_path / "v.safetensors")
    found = load_metric(str(tmp_path / "m.npy"), 3)(target, draft)
    assert found.tolist() == [2.0, 4.0, 6.0]
    assert load_metric(str(tmp_path / "v.safetensors"))(target, draft).tolist() == [5.0, 0.0, 5.0]
    metric = load_metric(f"{__name__}:halves")
    assert metric(target, draft).tolist() == [1.0, 0.0, 1.0]


def test_distance_rule_with_a_table(tmp_path: Path) -> None:
    """Rows are targets, columns drafts; NaN is further than anything."""
    table = np.array([[0.0, np.nan, 1.0], [0.5, 0.0, 9.0], [1.0, 9.0, 0.0]], np.float32)
    np.save(tmp_path / "t.npy", table)
    rule = parse_rule({"type": "distance", "epsilon": 1.0, "table": str(tmp_path / "t.npy")})
    pairs = [(target, draft) for target in range(3) for draft in range(3)]
    nodes = torch.arange(9)
    v = Verification(
        logits=torch.eye(3)[[target for target, _ in pairs]],
        draft_token_ids=torch.tensor([draft for _, draft in pairs]),
        depths=nodes,
        request_index=nodes * 0,
        exact_only=nodes < 0,
    )
    found = build_scorer(rule, allow_lossy=True, vocab_size=3).tolerated(v)
    assert found.tolist() == (np.nan_to_num(table, nan=9.0) <= 1.0).ravel().tolist()


def test_bad_metrics(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.zeros((3, 4)))
    np.save(tmp_path / "s.npy", np.zeros(3))
    np.save(tmp_path / "o.npy", np.array([object()]), allow_pickle=True)
    np.save(tmp_path / "t.npy", np.array(["a"]))
    np.save(tmp_path / "n.npy", -np.ones((9, 9)))
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "two.safetensors")
    bad = {
        "m.npy": "expected .vocab",
        "s.npy": "found 3 tokens, the target has 9",
        "o.npy": "is damaged, or no array of numbers",
        "t.npy": "expected numbers",
        "n.npy": "negative",
        "two.safetensors": "exactly one",
    }
    for name, text in bad.items():
        with pytest.raises(SpecExtError, match=text):
            load_metric(str(tmp_path / name), 9)
    for name in ("m.npy", "two.safetensors"):
        make_unreadable(tmp_path / name)
        with said_to_be_unreadable(tmp_path / name):
            load_metric(str(tmp_path / name), 9)
    for name in ("nothing", "no.such:thing", "math:nothing", "math:pi"):
        with pytest.raises(SpecExtError, match="distance"):
            load_metric(name)
    with pytest.raises(SpecExtError, match="one distance for each pair"):
        load_metric("torch:outer")(torch.arange(3), torch.arange(3))
