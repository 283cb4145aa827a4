# SPDX-License-Identifier: Apache-2.0
"""Greedy float32 output is token-identical to plain decoding, whatever is drafted."""

from typing import Any

import pytest
from generation import counters, run, sampling_params, tokens
from scenarios import PROMPTS, SCENARIOS, Scenario

from vllm_spec_ext.proposers import registry

METHODS: dict[str, dict[str, Any]] = {
    "oracle": {"method": "oracle", "num_speculative_tokens": 8},
    "noise": {"method": "noise", "num_speculative_tokens": 5},
    "input_copy": {"method": "input_copy", "num_speculative_tokens": 16},
}


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module", params=METHODS)
def speculative(request: pytest.FixtureRequest, make_engine: Any) -> Any:
    engine = make_engine(speculative_config=METHODS[request.param])
    engine.has_truth = request.param in ("oracle", "noise")
    return engine


def truths_of(engine: Any, expected: list[Any]) -> list[list[int]] | None:
    return [out[0] for out in expected] if engine.has_truth else None


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_tokens(name: str, plain: Any, speculative: Any) -> None:
    scenario = SCENARIOS[name]
    reference = run(plain, scenario)
    expected = tokens(reference)
    outputs = run(speculative, scenario, truths_of(speculative, expected))
    assert tokens(outputs) == expected
    for ours, theirs in zip(outputs, reference, strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert a.finish_reason == b.finish_reason
            assert a.text == b.text


def test_stop_conditions(plain: Any, speculative: Any) -> None:
    """Stop strings, stop tokens, minimum length and bad words taken from the true outputs."""
    base = run(plain, Scenario([{"max_tokens": 40}], PROMPTS[:4]))
    texts = [out.outputs[0].text for out in base]
    ids = [list(out.outputs[0].token_ids) for out in base]
    params = [
        {"max_tokens": 40, "stop": [texts[0][10:13]]},
        {"max_tokens": 40, "stop_token_ids": [ids[1][15]]},
        {"max_tokens": 40, "stop_token_ids": [ids[2][3]], "min_tokens": 9},
        {"max_tokens": 40, "bad_words": [texts[3][4:6], texts[3][8:9]]},
    ]
    scenario = Scenario(params, PROMPTS[:4])
    expected = tokens(run(plain, scenario))
    assert expected != tokens(base)
    assert tokens(run(speculative, scenario, truths_of(speculative, expected))) == expected


def test_logprobs_are_the_targets(plain: Any, speculative: Any) -> None:
    scenario = SCENARIOS["logprobs"]
    reference = run(plain, scenario)
    outputs = run(speculative, scenario, truths_of(speculative, tokens(reference)))
    for ours, theirs in zip(outputs, reference, strict=True):
        for a, b in zip(
            ours.outputs[0].logprobs or [], theirs.outputs[0].logprobs or [], strict=True
        ):
            assert list(a) == list(b)
            for token in a:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3)
                assert a[token].rank == b[token].rank


def test_abort_in_mid_generation(plain: Any, speculative: Any) -> None:
    scenario = SCENARIOS["mixed_lengths"]
    expected = tokens(run(plain, scenario))
    truths = truths_of(speculative, expected)
    core = speculative.llm_engine
    for i, prompt in enumerate(scenario.prompts):
        extra = {"truth": truths[i]} if truths else None
        core.add_request(f"abort-{i}", prompt, sampling_params(scenario.params[i], extra))
    finished = {}
    for step in range(1000):
        if step == 4:
            core.abort_request(["abort-1", "abort-4"])
        for out in core.step():
            if out.finished:
                finished[out.request_id] = list(out.outputs[0].token_ids)
        if not core.has_unfinished_requests():
            break
    kept = [i for i in range(len(scenario.prompts)) if i not in (1, 4)]
    assert finished == {f"abort-{i}": expected[i][0] for i in kept}


def test_preemption(plain: Any, make_engine: Any, request: pytest.FixtureRequest) -> None:
    """A cache too small for the batch: requests are preempted and come back."""
    scenario = Scenario([{"max_tokens": 100, "ignore_eos": True}], PROMPTS)
    expected = tokens(run(plain, scenario))
    engine = make_engine(speculative_config=METHODS["oracle"], num_gpu_blocks_override=24)
    before = counters(engine).get("vllm:num_preemptions", 0)
    assert tokens(run(engine, scenario, [out[0] for out in expected])) == expected
    assert counters(engine)["vllm:num_preemptions"] > before


def test_oracle_is_accepted_and_noise_is_not(plain: Any, make_engine: Any) -> None:
    """The identity tests mean nothing unless drafts really are accepted and rejected."""
    scenario = Scenario([{"max_tokens": 60, "ignore_eos": True}], PROMPTS)
    expected = tokens(run(plain, scenario))
    truths = [out[0] for out in expected]
    shares = {}
    for name in ("oracle", "noise"):
        engine = make_engine(speculative_config=METHODS[name])
        before = counters(engine)
        run(engine, scenario, truths)
        after = counters(engine)
        accepted, drafted = (
            after[key] - before[key]
            for key in (
                "vllm:spec_decode_num_accepted_tokens",
                "vllm:spec_decode_num_draft_tokens",
            )
        )
        shares[name] = accepted / drafted
    assert shares["oracle"] > 0.3
    assert shares["noise"] == 0


def test_state_is_freed(make_engine: Any, plain: Any) -> None:
    """Nothing is kept of requests that are gone, and outcomes were reported."""
    scenario = SCENARIOS["mixed_lengths"]
    expected = tokens(run(plain, scenario))
    engine = make_engine(speculative_config=METHODS["oracle"])
    run(engine, scenario, [out[0] for out in expected])
    run(engine, SCENARIOS["batch_of_one"], [expected[1][0]])
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    proposer = runner.drafter._proposer
    assert len(proposer.known) <= 1  # the last request is freed at the start of the next step
    assert len(runner._request_options) <= 1
    assert any(outcome.num_accepted for outcome in proposer.outcomes)
    assert all(0 <= o.num_accepted <= o.num_drafted for o in proposer.outcomes)


def test_registry_has_no_test_drafters_outside() -> None:
    assert registry.BUILTIN["input_copy"].startswith("vllm_spec_ext.")
