# SPDX-License-Identifier: Apache-2.0
"""Relaxed rules decide on the device as they do on the host."""

from typing import Any

import numpy as np
import torch
from generation import run, sampling_params
from scenarios import PROMPTS, Scenario

from gpu_check.identity import BACKEND, firsts
from gpu_check.site import Site, first_difference, require, require_identical
from vllm_spec_ext.engine.requests.state import RequestState
from vllm_spec_ext.engine.starting.spec_config import MethodSettings
from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.engine.verifying.relaxed_rule import RelaxedRule
from vllm_spec_ext.options import MethodOptions, RequestOptions
from vllm_spec_ext.scorers.narrow import narrow
from vllm_spec_ext.scorers.parse import parse_rule

VOCAB_SIZE = 50
RULES: list[dict[str, Any]] = [
    {"type": "top_k", "k": 3},
    {"type": "distance", "epsilon": 2},
    {"type": "min_block", "length": 3},
    {"type": "tolerance", "beta": 3, "tau": 1.0},
    {"type": "any_of", "rules": [{"type": "min_block", "length": 2}, {"type": "top_k", "k": 2}]},
]
LOGPROB_TOLERANCE = 2e-3
SCENARIO = Scenario([{"max_tokens": 16, "ignore_eos": True, "logprobs": 0}], PROMPTS[:4])
LOOSE = {
    "method": "oracle",
    "num_speculative_tokens": 12,
    "branches": 4,
    "wrong": 0.5,
    "scorer": {"type": "min_block", "length": 3},
    "allow_lossy": True,
}


def relaxed_rule(site: Site) -> dict[str, Any]:
    """Every rule on random logits, then one in an engine."""
    device = "cuda" if site.on_gpu else "cpu"
    tolerated = {rule["type"]: rule_on(rule, device) for rule in RULES}
    return {"tolerated": tolerated, **in_engine(site)}


def rule_on(given: dict[str, Any], device: str) -> int:
    """Number of rows that a rule tolerates on a device; raises CheckFailed unless as on the host.

    Two requests, one of them by the strict rule.
    """
    rule = parse_rule(given)
    settings = MethodSettings(method="input_copy", options=MethodOptions(), rule=rule)
    drafts = [list(range(12)), list(range(20, 26)), []]
    batch = DraftBatch.of(drafts, [[-1, *range(11)], [-1, -1, 0, 1, 2, 3], None])
    states = [
        RequestState(RequestOptions(), own, None, np.array([0]))
        for own in (None, narrow(rule, "exact"), None)
    ]
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(len(batch.request_of_row), VOCAB_SIZE, generator=chance)
    rows = torch.arange(12)
    logits[rows, rows] += 2.0  # drafts that are likely, though seldom the likeliest
    results = []
    for place in ("cpu", device):
        at = torch.device(place)
        decide = RelaxedRule(settings, VOCAB_SIZE).of_step(batch, states, [True] * 3, at)
        results.append([np.asarray(torch.as_tensor(part).cpu()) for part in decide(logits.to(at))])
    (true, true_logits), (ours, our_logits) = results
    require(
        bool((true == ours).all()) and np.allclose(true_logits, our_logits, atol=1e-5),
        f"rule {given['type']} on {device}: {ours.tolist()}, expected {true.tolist()} as on the "
        "host",
    )
    return int(np.count_nonzero(ours))


def in_engine(site: Site) -> dict[str, Any]:
    """Drafts are taken that the strict rule refuses; log-probabilities stay the target's."""
    plain = site.engine(backend=BACKEND)
    engine = site.engine(backend=BACKEND, speculative_config=LOOSE)
    expected = firsts(run(plain, SCENARIO))
    outputs = run(engine, SCENARIO, expected)
    changed = sum(
        first_difference(true, ours) is not None
        for true, ours in zip(expected, firsts(outputs), strict=True)
    )
    require(changed, "min_block: no answer changed, expected the rule to take wrong drafts")
    largest = 0.0
    for out in outputs:
        answer = out.outputs[0]
        prompt = list(out.prompt_token_ids)
        params = sampling_params({"max_tokens": 1, "prompt_logprobs": 0})
        given = {"prompt_token_ids": [*prompt, *answer.token_ids]}
        scored = plain.generate(given, params, use_tqdm=False)[0].prompt_logprobs[len(prompt) :]
        for token, ours, true in zip(answer.token_ids, answer.logprobs, scored, strict=True):
            largest = max(largest, abs(ours[token].logprob - true[token].logprob))
    require(
        largest < LOGPROB_TOLERANCE,
        f"a log-probability differs by {largest:.4f} from the target's own, expected less than "
        f"{LOGPROB_TOLERANCE}",
    )
    strict = [
        sampling_params(SCENARIO.params[0], {"truth": truth, "scorer": "exact"})
        for truth in expected
    ]
    exact = firsts(engine.generate(SCENARIO.prompts, strict, use_tqdm=False))
    compared = require_identical("requests that ask for the exact rule", expected, exact)
    return {"answers_changed": changed, "largest_difference": largest, "compared": compared}
