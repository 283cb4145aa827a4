# SPDX-License-Identifier: Apache-2.0
"""On the V2 runner, too, output is token-identical to plain decoding, whatever is drafted.

Sampled texts, too: noise is a function of seed and position there.
"""

from typing import Any

import pytest
from generation import (
    assert_equal_logprobs,
    count_preempted,
    run,
    run_with_aborts,
    sampling_params,
    tokens,
)
from scenarios import PROMPTS, SCENARIOS, Scenario
from test_greedy_identity import METHODS, runner_of
from test_placeholders import INPUT_COPY, PROMPT, verified_rows

ORACLES = ("oracle", "oracle_tree")
GUESSING = ("input_copy", "adaptive_ngram_chain", "adaptive_ngram_tree", "auto")
# Of the shared scenarios those that a chain and a tree do not run through in the same way.
BOTH = ("mixed_lengths", "penalties", "regex")
ONLY_TREES = (
    "seeded",
    "batch_of_one",
    "logprobs",
    "allowed_tokens",
    "max_model_len",
    "json_schema",
)
CASES = [
    *((name, method) for name in BOTH for method in ORACLES),
    *((name, "oracle_tree") for name in ONLY_TREES),
    ("several_samples", "oracle"),
    ("prefix_reused", "oracle"),
]
SHORT = Scenario([{"max_tokens": 24, "ignore_eos": True}], PROMPTS)


@pytest.fixture(scope="module")
def expected(plain: Any) -> dict[str, Any]:
    """What an engine that does not draft answers, as it is asked for."""
    return Answers(plain)


class Answers(dict[str, Any]):
    """By scenario; each is run once."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine

    def __missing__(self, name: str) -> Any:
        self[name] = run(self._engine, SCENARIOS[name])
        return self[name]


def truths(answers: Any) -> list[list[int]]:
    return [completions[0] for completions in tokens(answers)]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_same_tokens(name: str, method: str, expected: Any, make_engine: Any) -> None:
    engine = make_engine(speculative_config=METHODS[method])
    reference = expected[name]
    outputs = run(engine, SCENARIOS[name], truths(reference))
    assert tokens(outputs) == tokens(reference)
    for ours, theirs in zip(outputs, reference, strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert a.finish_reason == b.finish_reason
            assert_same_logprobs(a, b)


def assert_same_logprobs(ours: Any, theirs: Any) -> None:
    for place, true in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
        for token, entry in place.items():
            if token in true:
                assert entry.logprob == pytest.approx(true[token].logprob, abs=2e-4)


@pytest.mark.parametrize("method", GUESSING)
def test_methods(method: str, plain: Any, make_engine: Any) -> None:
    """Few tokens to choose from: the text repeats itself, so that guesses are right."""
    few = {"max_tokens": 30, "allowed_token_ids": [40, 42, 44], "ignore_eos": True}
    scenario = Scenario([few, {"max_tokens": 30}], PROMPTS)
    engine = make_engine(speculative_config=METHODS[method])
    assert tokens(run(engine, scenario)) == tokens(run(plain, scenario))


@pytest.mark.parametrize("method", ["oracle_tree"])
def test_preemption(
    method: str, plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache too small for the batch: requests come back in other places of the batch."""
    scenario = Scenario([{"max_tokens": 60, "ignore_eos": True}], PROMPTS)
    answers = run(plain, scenario)
    engine = make_engine(speculative_config=METHODS[method], num_gpu_blocks_override=12)
    preempted = count_preempted(engine, monkeypatch)
    assert tokens(run(engine, scenario, truths(answers))) == tokens(answers)
    assert preempted


def test_abort(plain: Any, make_engine: Any) -> None:
    scenario = SCENARIOS["mixed_lengths"]
    answers = truths(run(plain, scenario))
    engine = make_engine(speculative_config=METHODS["oracle_tree"])
    finished = run_with_aborts(engine, scenario, (4, 7), at_step=2, truths=answers)
    assert finished == {i: answers[i] for i in range(8) if i not in (4, 7)}


@pytest.mark.parametrize("method", [*ORACLES, "noise"])
def test_drafts_really_are_accepted_and_rejected(method: str, plain: Any, make_engine: Any) -> None:
    """The identity tests mean nothing unless this holds; state is freed and outcomes reported."""
    answers = run(plain, SHORT)
    engine = make_engine(speculative_config=METHODS[method])
    runner = runner_of(engine)
    proposer = runner.drafter._proposer
    outcomes, wrong_paths = proposer.outcomes, getattr(proposer, "wrong_paths", [])
    outcomes.clear()
    wrong_paths.clear()
    assert tokens(run(engine, SHORT, truths(answers))) == tokens(answers)
    assert wrong_paths == []
    accepted = sum(outcome.num_accepted for outcome in outcomes)
    drafted = sum(outcome.num_drafted for outcome in outcomes)
    assert drafted > 100
    assert accepted == 0 if method == "noise" else accepted > 0.2 * drafted
    run(engine, SCENARIOS["batch_of_one"], [[]])
    # The request of a step is freed at the start of the next one.
    assert len(runner.spec_states) <= 1
    assert len(runner.spec_requests) <= 1


def test_a_copy_is_drafted_again_in_the_next_turn(plain: Any, make_engine: Any) -> None:
    """The first answer is part of the second prompt, whose beginning is in the prefix cache."""
    engine = make_engine(speculative_config=METHODS["input_copy"])
    first = run(plain, Scenario([{"max_tokens": 20, "ignore_eos": True}], PROMPTS[:3]))
    prompts: Any = [
        {"prompt_token_ids": [*out.prompt_token_ids, *out.outputs[0].token_ids]} for out in first
    ]
    second = Scenario([{"max_tokens": 20, "ignore_eos": True}], prompts)
    answers = tokens(run(plain, second))
    for _ in range(2):
        assert tokens(run(engine, second)) == answers


def test_a_cached_prompt_verifies_no_placeholders(plain: Any, make_engine: Any) -> None:
    params = sampling_params({"max_tokens": 12, "ignore_eos": True})
    (out,) = plain.generate(PROMPT, params, use_tqdm=False)
    found, scheduled, verified = verified_rows(make_engine(speculative_config=INPUT_COPY), params)
    assert found == list(out.outputs[0].token_ids)
    assert (scheduled, verified) == ([-1] * 8, [])


@pytest.mark.parametrize("method", ORACLES)
def test_logprobs_of_chosen_tokens(method: str, plain: Any, make_engine: Any) -> None:
    """Beside requests that ask for none, of chains and trees."""
    chosen = {"max_tokens": 16, "ignore_eos": True, "logprob_token_ids": [5, 40, 300]}
    scenario = Scenario([chosen, {"max_tokens": 16, "ignore_eos": True}], PROMPTS)
    reference = run(plain, scenario)
    engine = make_engine(speculative_config=METHODS[method])
    outputs = run(engine, scenario, truths(reference))
    assert tokens(outputs) == tokens(reference)
    assert_equal_logprobs(outputs, reference, 2e-4)
