# SPDX-License-Identifier: Apache-2.0
"""Relaxed rules in the engine: strict ends, consent, narrowing, and log-probabilities."""

from typing import Any

import pytest
from generation import run, sampling_params, tokens
from scenarios import PROMPTS, Scenario

from vllm_spec_ext.errors import SpecExtError, UnknownNameError, UnsupportedError

SCENARIO = Scenario([{"max_tokens": 40, "ignore_eos": True}], PROMPTS)
ORACLE = {"method": "oracle", "num_speculative_tokens": 8, "wrong": 0.5}
TREE = {**ORACLE, "branches": 4, "num_speculative_tokens": 12}


@pytest.fixture(scope="module")
def expected(make_engine: Any) -> list[Any]:
    return run(make_engine(), SCENARIO)


def truths(expected: list[Any]) -> list[list[int]]:
    return [out[0] for out in tokens(expected)]


@pytest.mark.parametrize("base", [ORACLE, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "rule",
    [{"type": "top_k", "k": 1}, {"type": "tolerance", "beta": 1, "tau": 1.0}],
    ids=["top_k", "tolerance"],
)
def test_strict_end_is_exact(
    base: dict[str, Any], rule: dict[str, Any], make_engine: Any, expected: list[Any]
) -> None:
    engine = make_engine(speculative_config={**base, "scorer": rule})
    assert engine.llm_engine.vllm_config.speculative_config.lossless
    assert tokens(run(engine, SCENARIO, truths(expected))) == tokens(expected)


@pytest.mark.parametrize("base", [ORACLE, TREE], ids=["chain", "tree"])
def test_min_block_takes_drafts_and_reports_the_targets_logprobs(
    base: dict[str, Any], make_engine: Any, expected: list[Any]
) -> None:
    config = {**base, "scorer": {"type": "min_block", "length": 3}, "allow_lossy": True}
    engine = make_engine(speculative_config=config)
    assert not engine.llm_engine.vllm_config.speculative_config.lossless
    scenario = Scenario([{"max_tokens": 12, "ignore_eos": True, "logprobs": 2}], PROMPTS[:4])
    outputs = run(engine, scenario, truths(expected))
    assert tokens(outputs) != [[out[:12]] for out in truths(expected)[:4]]
    plain = make_engine()
    for out in outputs:
        ids = list(out.prompt_token_ids) + list(out.outputs[0].token_ids)
        params = sampling_params({"max_tokens": 1, "prompt_logprobs": 2})
        scored = plain.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
        start = len(out.prompt_token_ids)
        for token, ours, theirs in zip(
            ids[start:], out.outputs[0].logprobs, scored.prompt_logprobs[start:], strict=True
        ):
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=2e-3)


def test_a_request_may_ask_for_the_exact_rule(make_engine: Any, expected: list[Any]) -> None:
    config = {**ORACLE, "scorer": {"type": "min_block", "length": 3}, "allow_lossy": True}
    engine = make_engine(speculative_config=config)
    params = [
        sampling_params(SCENARIO.params[0], {"truth": truth, "scorer": "exact"})
        for truth in truths(expected)
    ]
    assert tokens(engine.generate(PROMPTS, params, use_tqdm=False)) == tokens(expected)


def test_a_request_may_not_loosen_the_rule(make_engine: Any, expected: list[Any]) -> None:
    from vllm.exceptions import VLLMValidationError

    engine = make_engine(speculative_config={**ORACLE, "scorer": {"type": "top_k", "k": 1}})
    for value in ({"k": 2}, "min_block", {"type": "tolerance", "beta": 3}):
        with pytest.raises(VLLMValidationError, match=r"spec_ext\.scorer"):
            engine.generate(PROMPTS[0], sampling_params({}, {"scorer": value}), use_tqdm=False)
    assert engine.generate(PROMPTS[0], sampling_params({"max_tokens": 2}), use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"scorer": {"type": "top_k", "k": 2}}, UnsupportedError, "allow_lossy"),
        ({"scorer": {"type": "topk", "k": 2}}, UnknownNameError, "top_k"),
        ({"scorer": {"type": "top_k", "kk": 2}}, UnknownNameError, "kk"),
        ({"scorer": {"type": "top_k", "k": 0}}, SpecExtError, "greater"),
        ({"scorer": 3}, SpecExtError, "expected an object"),
        ({"scorer": "exact", "allow_lossy": "yes"}, SpecExtError, "true or false"),
        (
            {"scorer": {"type": "min_block", "length": 20}, "allow_lossy": True},
            SpecExtError,
            "at most",
        ),
    ],
)
def test_bad_rules_are_refused_before_the_model_loads(
    options: dict[str, Any], error: type[Exception], text: str, make_engine: Any
) -> None:
    with pytest.raises(error, match=text):
        make_engine(speculative_config={**ORACLE, **options})


def test_eta_cuts_what_is_improbable(make_engine: Any) -> None:
    """With a cutoff near 1 only the most probable token is left, in every kind of row."""
    from vllm.exceptions import VLLMValidationError

    greedy = run(make_engine(), Scenario([{"max_tokens": 20, "ignore_eos": True}], PROMPTS))
    engine = make_engine(speculative_config=ORACLE)
    params = []
    for truth in truths(greedy):
        given = sampling_params(
            {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0}, {"truth": truth}
        )
        given.extra_args.update(eta_cutoff=0.999, eta_alpha=1e6)
        params.append(given)
    assert tokens(engine.generate(PROMPTS, params, use_tqdm=False)) == tokens(greedy)
    bad = sampling_params({})
    bad.extra_args = {"eta_cutoff": 2.0}
    with pytest.raises(VLLMValidationError, match="eta_cutoff"):
        engine.generate(PROMPTS[0], bad, use_tqdm=False)
