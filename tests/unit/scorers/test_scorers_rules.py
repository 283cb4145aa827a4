# SPDX-License-Identifier: Apache-2.0
"""Every relaxed rule against a slow, obvious reference, on chains and trees."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spec_ext.scorers.build import build_scorer, warm_up
from vllm_spec_ext.scorers.narrow import narrow
from vllm_spec_ext.scorers.options import (
    AnyOfRule,
    DistanceRule,
    MinBlockRule,
    ScorerOptions,
    ToleranceRule,
    TopKRule,
)
from vllm_spec_ext.scorers.parse import parse_rule
from vllm_spec_ext.scorers.registry import names
from vllm_spec_ext.scorers.rules.base import Verification
from vllm_spec_ext.scorers.rules.ranking import BLOCK, first_argmax, stands, stands_on_device
from vllm_spec_ext.scorers.walk.tree import node_depths, verifying_rows

RULES: list[dict[str, Any]] = [
    {"type": "exact"},
    {"type": "top_k", "k": 2},
    {"type": "top_k", "k": 3},
    {"type": "distance", "epsilon": 2},
    {"type": "min_block", "length": 3},
    {"type": "tolerance", "beta": 3, "tau": 1.0},
    {"type": "tolerance", "beta": 2, "tau": 0.5},
    {"type": "any_of", "rules": [{"type": "min_block", "length": 2}, {"type": "top_k", "k": 2}]},
    {"type": "any_of", "rules": [{"type": "distance", "epsilon": 1}, {"type": "tolerance"}]},
    {
        "type": "any_of",
        "rules": [{"type": "distance", "epsilon": 1}, {"type": "min_block", "length": 2}],
    },
]
STRICT: list[dict[str, Any]] = [
    {"type": "top_k", "k": 1},
    {"type": "distance", "epsilon": 0},
    {"type": "min_block", "length": 1},
    {"type": "tolerance", "beta": 1},
    {"type": "tolerance", "beta": 5, "tau": 0.0},
]


def make_batch(seed: int, *, tree: bool, vocab: int = 7, requests: int = 4) -> Verification:
    """A random batch with ties, forbidden tokens, unknown ids, sampled and exact-only nodes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 7, requests)
    starts = np.concatenate([[0], sizes.cumsum()])
    parents = [rng.integers(-1, i) if tree and i else i - 1 for n in sizes for i in range(n)]
    num_nodes = len(parents)
    # Multiples of a half, so that ties and gaps of exactly tau occur.
    logits = torch.from_numpy(rng.integers(-4, 5, (num_nodes + requests, vocab)) / 2).float()
    logits[torch.from_numpy(rng.random(logits.shape) < 0.15)] = -torch.inf
    logits[:, 0] = -2.0  # no row forbids everything
    return Verification(
        logits=logits,
        draft_token_ids=torch.from_numpy(rng.integers(-1, vocab + 1, num_nodes)),
        depths=torch.from_numpy(node_depths(np.array(parents, np.int64), starts)),
        request_index=torch.from_numpy(np.repeat(np.arange(requests), sizes)),
        exact_only=torch.from_numpy(rng.random(num_nodes) < 0.2),
        rows=torch.from_numpy(verifying_rows(np.array(parents, np.int64), starts)),
        parents=torch.tensor(parents, dtype=torch.int64) if tree else None,
        sampled=torch.from_numpy(rng.random(num_nodes) < 0.4),
    )


def reference(rule: ScorerOptions, v: Verification, node: int) -> bool:
    """What one rule says of one node, by definition."""
    row = v.logits[int(v.verifying_rows[node])].tolist()
    token = int(v.draft_token_ids[node])
    if not 0 <= token < len(row) or row[token] == -np.inf:
        return False
    order = sorted(range(len(row)), key=lambda x: (-row[x], x))
    rank, best = order.index(token), order[0]
    exact = token == best and not bool(v.sampled[node])  # type: ignore[index]
    if bool(v.exact_only[node]):
        return exact
    if isinstance(rule, AnyOfRule):
        return any(reference(member, v, node) for member in rule.rules)
    relaxed = False
    if isinstance(rule, TopKRule) and rule.k > 1:
        relaxed = rank < rule.k
    elif isinstance(rule, ToleranceRule) and rule.beta > 1 and rule.tau > 0:
        relaxed = rank < rule.beta and row[best] - row[token] <= rule.tau
    elif isinstance(rule, DistanceRule) and rule.epsilon > 0:
        relaxed = abs(token - best) <= rule.epsilon
    elif isinstance(rule, MinBlockRule):
        mine = [i for i in range(v.num_nodes) if v.request_index[i] == v.request_index[node]]
        first_path, last = set(), -1
        for position, i in enumerate(mine):
            if v.parents is not None and int(v.parents[i]) != last:
                break
            first_path.add(i)
            last = position
        relaxed = node in first_path and int(v.depths[node]) < rule.length - 1
    return relaxed or exact


@pytest.mark.parametrize("options", RULES + STRICT, ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_rule_equals_reference(options: dict[str, Any], tree: bool, seed: int) -> None:
    rule = parse_rule(options)
    v = make_batch(seed, tree=tree)
    before = v.logits.clone()
    found = build_scorer(rule, allow_lossy=True, vocab_size=7).tolerated(v)
    assert found.tolist() == [reference(rule, v, i) for i in range(v.num_nodes)]
    assert torch.equal(v.logits, before)


@pytest.mark.parametrize("options", STRICT, ids=str)
def test_strict_end_is_exact_even_without_normalisation(options: dict[str, Any]) -> None:
    """The strict parameters reach the exact verdict in the rules' own arithmetic too."""
    rule = parse_rule(options)
    loose = parse_rule(
        {**options, **{k: 2 for k in ("k", "epsilon", "length", "tau") if k in options}}
    )
    if isinstance(rule, ToleranceRule):
        loose = parse_rule({"type": "tolerance", "beta": 5, "tau": 2.0})
    for seed in range(50):
        v = make_batch(seed, tree=True)
        scorer = build_scorer(loose, allow_lossy=True).for_batch([rule] * 4, "cpu")
        exact = build_scorer(None).tolerated(v)
        assert torch.equal(scorer.tolerated(v), exact)
        greedy = ~v.sampled & v.known & (v.draft_logits > -torch.inf)  # type: ignore[operator]
        argmax = v.logits[v.verifying_rows].argmax(1) == v.draft_token_ids
        assert torch.equal(exact, argmax & greedy)


@pytest.mark.parametrize("options", RULES[1:], ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_mixed_batch_equals_requests_alone(options: dict[str, Any], seed: int) -> None:
    """Per-request parameters give what each request would get from a server of its own."""
    server = parse_rule(options)
    values: list[Any]
    smaller: dict[str, float] = {"k": 1, "epsilon": 0.5, "length": 2, "beta": 2, "tau": 0.5}
    if server.type == "any_of":
        values = [None, "exact", {"rules": ["exact", None]}, {"rules": [None, "exact"]}]
    else:
        keys = [name for name in smaller if hasattr(server, name)]
        values = [None, "exact", {k: smaller[k] for k in keys}, {keys[0]: smaller[keys[0]]}]
    rules = [narrow(server, value) for value in values]
    v = make_batch(seed, tree=True)
    scorer = build_scorer(server, allow_lossy=True)
    own = [None if x is None else r for x, r in zip(values, rules, strict=True)]
    found = scorer.for_batch(own, "cpu")
    expected = [reference(rules[int(v.request_index[i])], v, i) for i in range(v.num_nodes)]
    assert found.tolerated(v).tolist() == expected


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([3, BLOCK - 1, BLOCK, 2 * BLOCK + 5]))
def test_kernels_equal_torch(seed: int, vocab: int) -> None:
    """Block boundaries, ties across blocks, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (9, vocab), generator=generator).float()
    logits[0] = 0.0
    logits[1] = -torch.inf
    logits[2, vocab // 2] = torch.nan
    logits[3, -1] = torch.inf
    logits[4, [0, -1]] = 9.0
    assert torch.equal(first_argmax(logits), logits.argmax(1))
    rows = torch.randint(0, 9, (40,), generator=generator)
    tokens = torch.randint(0, vocab, (40,), generator=generator)
    tokens[:9] = logits.argmax(1)
    rows[:9] = torch.arange(9)
    limits = torch.randint(0, 5, (40,), generator=generator)
    margins = torch.tensor([0.0, 0.5, 1.0, torch.inf])[torch.arange(40) % 4]
    found = stands(logits, rows, tokens, limits, margins)
    assert torch.equal(found, stands_on_device(logits, rows, tokens, limits, margins))
    everything = stands(logits, rows[:9], tokens[:9], limits[:9] * 0 + 1, margins[:9])
    assert everything.tolist() == [bool(x > -torch.inf) for x in logits.amax(1)]


def test_forbidden_and_stop_tokens_are_never_let_through() -> None:
    """A wide rule must not accept what grammar, bad words or a stop id rule out."""
    logits = torch.tensor([[3.0, -torch.inf, -torch.inf, 2.0]] * 3)
    zeros = torch.zeros(3, dtype=torch.int64)
    v = Verification(
        logits=logits,
        draft_token_ids=torch.tensor([1, 3, 3]),
        depths=zeros,
        request_index=zeros,
        exact_only=torch.tensor([False, True, False]),
    )
    wide: list[dict[str, Any]] = [
        {"type": "top_k", "k": 4},
        {"type": "distance", "epsilon": 9},
        {"type": "min_block", "length": 9},
        {"type": "tolerance", "beta": 4, "tau": 9.0},
    ]
    for options in wide:
        found = build_scorer(parse_rule(options), allow_lossy=True).tolerated(v)
        assert found.tolist() == [False, False, True], options


def test_every_rule_warms_up_and_takes_an_empty_batch() -> None:
    empty = make_batch(0, tree=True, requests=0)
    assert {rule["type"] for rule in RULES} == set(names())
    for options in RULES:
        scorer = build_scorer(parse_rule(options), allow_lossy=True)
        warm_up(scorer)
        assert scorer.tolerated(empty).shape == (0,)
        assert scorer.lossless == (options["type"] == "exact")
