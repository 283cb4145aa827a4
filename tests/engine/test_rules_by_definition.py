# SPDX-License-Identifier: Apache-2.0
"""Relaxed rules in the engine emit what their definitions say, token by token.

The expected text comes from `relaxed_reference.py`, which knows the target and the definitions and
nothing of the plugin; the engine gets the same drafts at the same places.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import run, sampling_params, tokens
from homogeneity import same_distribution_p_value
from relaxed_reference import Decoded, Request, Target, decode, sample
from sampling_distributions import DIFFERENT, NUM_SAMPLES, PROMPT, SAME, Chances, first_tokens
from scenarios import PROMPTS, Scenario
from test_greedy_identity import runner_of

Expected = Callable[[str, str], list[tuple[Request, Decoded]]]

RULES: dict[str, dict[str, Any]] = {
    "top_k": {"type": "top_k", "k": 3},
    "tolerance": {"type": "tolerance", "beta": 4, "tau": 0.7},
    "distance": {"type": "distance", "epsilon": 2},
    "min_block": {"type": "min_block", "length": 3},
    "any_of": {
        "type": "any_of",
        "rules": [{"type": "min_block", "length": 2}, {"type": "top_k", "k": 2}],
    },
}
STRICT: dict[str, Any] = {
    "top_k": {"k": 1},
    "tolerance": {"tau": 0.0},
    "distance": {"epsilon": 0},
    "min_block": {"length": 1},
    "any_of": "exact",
}
SHAPES = {"chain": [-1, 0, 1, 2], "tree": [-1, 0, 1, -1, 3, 3, -1, 5]}
STOP = 7  # a token that some drafts hold
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> Target:
    return Target(tiny_model)


def engine_with(make_engine: Any, rule: str) -> Any:
    config = {"method": "script", "num_speculative_tokens": 8, "scorer": RULES[rule]}
    return make_engine(speculative_config={**config, "allow_lossy": True})


@pytest.fixture(scope="module")
def by_definition(target: Target, make_engine: Any) -> Expected:
    """Requests and what the reference says, by rule and shape; one request allows some tokens."""
    tokenizer = make_engine().get_tokenizer()

    @cache
    def decoded(rule: str, shape: str) -> list[tuple[Request, Decoded]]:
        pairs = []
        for i, prompt in enumerate(PROMPTS[:3]):
            request = Request(
                prompt=tokenizer(prompt).input_ids,
                num_tokens=NUM_TOKENS,
                exact_ids=[STOP],
                allowed=range(2, 260) if i == 1 else None,
                parents=SHAPES[shape],
            )
            pairs.append((request, decode(target, RULES[rule], request, seed=i)))
        return pairs

    return decoded


def params_of(request: Request, result: Decoded) -> Any:
    given = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 1, "stop_token_ids": [STOP]}
    if request.allowed is not None:
        given["allowed_token_ids"] = list(request.allowed)
    return sampling_params(given, {"drafts": result.drafts})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_text_and_logprobs(
    rule: str, shape: str, by_definition: Expected, make_engine: Any
) -> None:
    engine = engine_with(make_engine, rule)
    pairs = by_definition(rule, shape)
    results = [result for _, result in pairs]
    params = [params_of(*pair) for pair in pairs]
    prompts = [{"prompt_token_ids": request.prompt} for request, _ in pairs]
    outcomes = runner_of(engine).drafter._proposer.outcomes
    outcomes.clear()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    # The reference goes on behind a stop token that the target itself chose.
    for out, result in zip(outputs, results, strict=True):
        completion = out.outputs[0]
        end = result.tokens.index(STOP) + 1 if STOP in result.tokens else NUM_TOKENS
        assert list(completion.token_ids) == result.tokens[:end]
        found = [
            place[token].logprob
            for place, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert found == pytest.approx(result.logprobs[:end], abs=2e-3)
    # Otherwise this says nothing about the rule.
    assert sum(result.num_tolerated for result in results) > 5
    assert sum(result.num_refused for result in results) > 5
    assert sum(o.num_accepted for o in outcomes) > 10
    drafted = [t for result in results for draft in result.drafts.values() for t in draft[0]]
    assert STOP in drafted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_strict_parameters_of_a_request_give_the_targets_own_text(
    rule: str, shape: str, by_definition: Expected, make_engine: Any
) -> None:
    """The rule's own code at its strict end, beside requests that keep the server's rule."""
    plain = run(make_engine(), Scenario([{"max_tokens": NUM_TOKENS, "ignore_eos": True}], PROMPTS))
    engine = engine_with(make_engine, rule)
    results = [result for _, result in by_definition(rule, shape)]
    given = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    params = []
    for i in range(len(PROMPTS)):
        own = {"scorer": STRICT[rule]} if i % 2 else {}
        drafts = results[i % len(results)].drafts
        params.append(sampling_params(given, {"drafts": drafts, **own}))
    outputs = tokens(engine.generate(PROMPTS, params, use_tqdm=False))
    assert outputs[1::2] == tokens(plain)[1::2]
    assert outputs[::2] != tokens(plain)[::2]


@pytest.mark.parametrize("rule", RULES)
def test_sampled_requests_follow_the_documented_distribution(
    rule: str, target: Target, make_engine: Any
) -> None:
    """Tolerated tokens stand for certain, all others are verified losslessly."""
    common = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    plain = make_engine(**common)
    fixed = {"method": "fixed", "num_speculative_tokens": 16}
    lossy = {**fixed, "scorer": RULES[rule], "allow_lossy": True}
    engine = make_engine(**common, speculative_config=lossy)
    likely = Chances(plain).tokens
    # The second best of the first place is often among the best of the next ones, too.
    allowed = sorted({*likely[:6:2], likely[1], likely[0] + 1, likely[0] + 2} - {0})
    draft = [likely[2], likely[0] + 1, likely[2]]
    given = {"temperature": 1.0, "max_tokens": 7, "ignore_eos": True, "allowed_token_ids": allowed}
    params = sampling_params(given, {"tokens": draft})
    found = first_tokens(engine, [params] * NUM_SAMPLES)
    prompt = plain.get_tokenizer()(PROMPT).input_ids
    request = Request(prompt, num_tokens=3, allowed=allowed)
    generator = torch.Generator().manual_seed(0)
    expected = sample(target, RULES[rule], request, draft, 4 * NUM_SAMPLES, generator)
    assert same_distribution_p_value(expected, found) > SAME
    unbiased = first_tokens(plain, [sampling_params({**given, "max_tokens": 3})] * NUM_SAMPLES)
    assert same_distribution_p_value(unbiased, found) < DIFFERENT
