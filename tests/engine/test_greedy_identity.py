# SPDX-License-Identifier: Apache-2.0
"""Greedy float32 output is token-identical to plain decoding, whatever is drafted."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from generation import (
    ALWAYS_DRAFT,
    assert_equal_logprobs,
    count_preempted,
    run,
    run_with_aborts,
    tokens,
)
from scenarios import LONG, LONG_SIZES, PROMPTS, SCENARIOS, Scenario
from worker_counts import kept_counts

from vllm_spec_ext.engine.drafting import drafter
from vllm_spec_ext.engine.row_padding import Layer, RowPadding
from vllm_spec_ext.engine.trees import attention
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import Draft, StepContext, StepOutcome
from vllm_spec_ext.proposers.draft_tree import parents_of

# The overlay is shared, so what one scenario answered is drafted when the prompt comes again.
NGRAMS = {"method": "adaptive_ngram", "overlay": "both", "min_confidence": 0.0, **ALWAYS_DRAFT}

METHODS: dict[str, dict[str, Any]] = {
    "oracle": {"method": "oracle", "num_speculative_tokens": 8},
    "oracle_tree": {"method": "oracle", "num_speculative_tokens": 12, "branches": 4},
    "noise": {"method": "noise", "num_speculative_tokens": 5},
    "input_copy": {"method": "input_copy", "num_speculative_tokens": 16, **ALWAYS_DRAFT},
    "adaptive_ngram_tree": {**NGRAMS, "num_speculative_tokens": 16},
    "auto": {"method": "auto", "num_speculative_tokens": 24, **ALWAYS_DRAFT},
    "suffix_tree": {"method": "suffix_tree", "num_speculative_tokens": 12, **ALWAYS_DRAFT},
    "recycling": {"method": "recycling", "num_speculative_tokens": 12, **ALWAYS_DRAFT},
    "adaptive_ngram_chain": {**NGRAMS, "num_speculative_tokens": 6, "tree": False},
}


WARMED = ("walk", "eta", "top_columns", "multi_step")  # of a proposer that draws trees


@pytest.fixture(scope="module", params=METHODS)
def speculative(request: pytest.FixtureRequest, make_engine: Any) -> Any:
    engine = make_engine(speculative_config=METHODS[request.param])
    engine.has_truth = request.param in ("oracle", "oracle_tree", "noise")
    return engine


class Answers(dict[Any, Any]):
    """Of plain decoding, which is asked once, and not again for every method."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self._plain = plain

    def __missing__(self, name: str) -> Any:
        self[name] = run(self._plain, SCENARIOS[name])
        return self[name]


@pytest.fixture(scope="module")
def answers(plain: Any) -> Answers:
    """Outputs by name of a scenario."""
    return Answers(plain)


Case = tuple[Scenario, list[Any]]


def truths_of(engine: Any, expected: list[Any]) -> list[list[int]] | None:
    return [out[0] for out in expected] if engine.has_truth else None


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_tokens(name: str, answers: Answers, speculative: Any) -> None:
    reference = answers[name]
    expected = tokens(reference)
    outputs = run(speculative, SCENARIOS[name], truths_of(speculative, expected))
    assert tokens(outputs) == expected
    for ours, theirs in zip(outputs, reference, strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert a.finish_reason == b.finish_reason
            assert a.text == b.text


def test_a_seeded_request_with_a_chunked_prefill(make_engine: Any) -> None:
    """On a CPU, plain vLLM 0.32 ends with such a request; its budget here takes it in one piece."""
    params = [{"max_tokens": 20, "temperature": 1.0, "seed": seed} for seed in (3, 4)]
    scenario = Scenario(params, PROMPTS)
    expected = tokens(run(make_engine(max_num_batched_tokens=2048), scenario))
    engine = make_engine(speculative_config=METHODS["oracle"])
    assert tokens(run(engine, scenario, [out[0] for out in expected])) == expected


@pytest.fixture(scope="module")
def stopping(plain: Any) -> Case:
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
    return scenario, expected


@pytest.fixture(scope="module")
def stopping_late(plain: Any) -> Case:
    """A stop token right behind the minimum length, behind an accepted draft that began before."""
    base = run(plain, Scenario([{"max_tokens": 24, "ignore_eos": True}], PROMPTS))
    params = []
    for index, out in enumerate(base):
        least = 4 + index
        stop = out.outputs[0].token_ids[least]
        params.append({"max_tokens": 24, "min_tokens": least, "stop_token_ids": [stop]})
    scenario = Scenario(params, PROMPTS)
    expected = tokens(run(plain, scenario))
    assert sum(len(one[0]) < 24 for one in expected) >= 4
    return scenario, expected


@pytest.mark.parametrize("case", ["stopping", "stopping_late"])
def test_stop_conditions(case: str, request: pytest.FixtureRequest, speculative: Any) -> None:
    scenario, expected = request.getfixturevalue(case)
    assert tokens(run(speculative, scenario, truths_of(speculative, expected))) == expected


@pytest.fixture(scope="module")
def chosen_logprobs(plain: Any) -> tuple[Scenario, Any]:
    """As vLLM's generative scoring asks for them, beside requests that ask for none."""
    chosen = {"max_tokens": 20, "logprob_token_ids": [5, 40, 300]}
    scenario = Scenario([chosen, {"max_tokens": 20}], PROMPTS)
    return scenario, run(plain, scenario)


def test_logprobs_of_chosen_tokens(chosen_logprobs: tuple[Scenario, Any], speculative: Any) -> None:
    scenario, reference = chosen_logprobs
    outputs = run(speculative, scenario, truths_of(speculative, tokens(reference)))
    assert tokens(outputs) == tokens(reference)
    assert_equal_logprobs(outputs, reference, 1e-3)


def test_logprobs_are_the_targets(answers: Answers, speculative: Any) -> None:
    reference = answers["logprobs"]
    outputs = run(speculative, SCENARIOS["logprobs"], truths_of(speculative, tokens(reference)))
    for ours, theirs in zip(outputs, reference, strict=True):
        for a, b in zip(
            ours.outputs[0].logprobs or [], theirs.outputs[0].logprobs or [], strict=True
        ):
            assert list(a) == list(b)
            for token in a:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3)
                assert a[token].rank == b[token].rank


def test_abort_in_mid_generation(answers: Answers, speculative: Any) -> None:
    scenario = SCENARIOS["mixed_lengths"]
    expected = tokens(answers["mixed_lengths"])
    truths = truths_of(speculative, expected)
    # An engine that has answered these prompts before is done before anything can be aborted.
    speculative.collective_rpc("spec_ext_reset")
    finished = run_with_aborts(speculative, scenario, (4, 7), at_step=2, truths=truths)
    assert finished == {i: one[0] for i, one in enumerate(expected) if i not in (4, 7)}


@pytest.mark.parametrize("name", ["oracle", "oracle_tree"])
def test_every_layer_sees_a_window(
    name: str, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees are verified there, too, beside blocks that the window has left."""
    window = {"sliding_window": 48, "layer_types": ["sliding_attention"] * 3}
    sizes = {**LONG_SIZES, "hf_overrides": window}
    expected = tokens(run(make_engine(**sizes), LONG))
    engine = make_engine(speculative_config=METHODS[name], **sizes)
    assert engine.llm_engine.model_config.get_sliding_window() == 48
    counted = kept_counts(runner_of(engine), monkeypatch)
    for _ in range(2):  # then from the prefix cache
        assert tokens(run(engine, LONG, [out[0] for out in expected])) == expected
    found = counted()["counts"]
    assert found["accepted_nodes"] > 100
    assert (found.get("branching_drafts", 0) > 50) == (name == "oracle_tree")


@pytest.mark.parametrize("name", ["oracle", "oracle_tree"])
def test_preemption(
    name: str, plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache too small for the batch: requests are preempted and come back."""
    scenario = Scenario([{"max_tokens": 100, "ignore_eos": True}], PROMPTS)
    expected = tokens(run(plain, scenario))
    engine = make_engine(speculative_config=METHODS[name], num_gpu_blocks_override=16)
    preempted = count_preempted(engine, monkeypatch)
    assert tokens(run(engine, scenario, [out[0] for out in expected])) == expected
    assert preempted


@pytest.mark.v1_runner
@pytest.mark.parametrize("name", ["oracle", "oracle_tree", "noise"])
@pytest.mark.parametrize("num_prompts", [1, 2, len(PROMPTS)])
def test_rows_that_are_added_change_nothing(
    name: str, num_prompts: int, plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario([{"max_tokens": 30, "logprobs": 2}], PROMPTS[:num_prompts])
    expected = tokens(run(plain, scenario))
    engine = make_engine(speculative_config=METHODS[name])
    runner = runner_of(engine)
    prepare, added = runner._preprocess, []

    def counted(scheduler_output: Any, num_rows: int, *more: Any, **named: Any) -> Any:
        added.append(num_rows - scheduler_output.total_num_scheduled_tokens)
        return prepare(scheduler_output, num_rows, *more, **named)

    monkeypatch.setattr(runner, "_preprocess", counted)
    monkeypatch.setattr(runner, "row_padding", RowPadding([0, *[16] * 15]))
    assert tokens(run(engine, scenario, [out[0] for out in expected])) == expected
    assert max(added) > 0


def test_rows_are_measured_when_an_engine_starts(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def measure(layers: Sequence[Layer]) -> RowPadding:
        measured.append(sum(layer.num_inputs * layer.num_outputs for layer in layers))
        return RowPadding([0, 4])

    monkeypatch.setattr(RowPadding, "measured", measure)
    engine = make_engine(speculative_config={"method": "noise", "num_speculative_tokens": 1})
    assert measured[0] > 10_000
    assert runner_of(engine).row_padding.quickest == (0, 4)


def test_kernels_are_compiled_when_an_engine_starts(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that covers is held by tests/unit/test_compiled_at_start.py."""
    called: set[str] = set()
    places = [(drafter, name) for name in vars(drafter) if name.startswith("warm_up_")]
    for module, name in [*places, (attention, "warm_up")]:
        monkeypatch.setattr(module, name, partial(called.add, f"{module.__name__}.{name}"))
    drawn = {"method": "drawn", "num_speculative_tokens": 2}
    make_engine(speculative_config=drawn)
    assert called == {
        *(f"{drafter.__name__}.warm_up_{name}" for name in WARMED),
        f"{attention.__name__}.warm_up",
    }


@pytest.mark.parametrize("name", ["oracle", "oracle_tree", "noise"])
def test_drafts_really_are_accepted_and_rejected(name: str, plain: Any, make_engine: Any) -> None:
    """The identity tests mean nothing unless this holds; state is freed and outcomes reported."""
    scenario = Scenario([{"max_tokens": 60, "ignore_eos": True}], PROMPTS)
    expected = tokens(run(plain, scenario))
    engine = make_engine(speculative_config=METHODS[name])
    runner = runner_of(engine)
    proposer = runner.drafter._proposer
    outcomes, wrong_paths = proposer.outcomes, getattr(proposer, "wrong_paths", [])
    outcomes.clear()
    wrong_paths.clear()
    run(engine, scenario, [out[0] for out in expected])
    assert wrong_paths == []
    accepted = sum(outcome.num_accepted for outcome in outcomes)
    drafted = sum(outcome.num_drafted for outcome in outcomes)
    assert drafted > 200
    assert all(0 <= outcome.num_accepted <= outcome.num_drafted for outcome in outcomes)
    assert accepted == 0 if name == "noise" else accepted > 0.2 * drafted
    run(engine, SCENARIOS["batch_of_one"], [[]])
    # The request of a step is freed at the start of the next one.
    assert len(runner.spec_states) <= 1


@pytest.mark.parametrize("name", ["oracle", "oracle_tree"])
def test_nothing_is_verified_behind_a_stop_token(
    name: str, plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the proposer hears of its own nodes, whatever was left out between them."""
    asked = {"max_tokens": 30, "ignore_eos": True}
    truths = [one[0] for one in tokens(run(plain, Scenario([asked], PROMPTS)))]
    # What the oracle drafts in the place of the truth, and one token of the truth.
    wrong = 1 if name == "oracle" else 2
    stops = [[*{(token + wrong) % 500 for token in one} - {*one}, *one[25:26]] for one in truths]
    scenario = Scenario([{**asked, "stop_token_ids": found} for found in stops], PROMPTS)
    expected = tokens(run(plain, scenario))
    runner = runner_of(make_engine(speculative_config=METHODS[name]))
    proposer, draft, sizes = runner.drafter._proposer, runner.drafter.draft, [0, 0]

    def watched(step: StepContext, *told: Any) -> list[Draft]:
        drafts: list[Draft] = draft(step, *told)
        for request, kept in zip(step.requests, drafts, strict=True):
            stopping = [token in request.ends for token in kept.tokens.tolist()]
            assert not any(stopping[parent] for parent in parents_of(kept) if parent >= 0)
            sizes[0] += len(kept)
            sizes[1] += len(proposer._drafted[request.request_id][0])
        return drafts

    monkeypatch.setattr(runner.drafter, "draft", watched)
    proposer.wrong_paths.clear()
    assert tokens(run(make_engine(speculative_config=METHODS[name]), scenario, truths)) == expected
    assert 0 < sizes[0] < 0.9 * sizes[1]
    assert proposer.wrong_paths == []


@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_ngram_drafts_really_are_accepted_and_rejected(
    kind: str, plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time the answers are known, the first time they are guessed."""
    scenario = Scenario([{"max_tokens": 40, "ignore_eos": True}], PROMPTS)
    expected = tokens(run(plain, scenario))
    engine = make_engine(speculative_config=METHODS[f"adaptive_ngram_{kind}"])
    outcomes: list[StepOutcome] = []
    proposer = runner_of(engine).drafter._proposer
    observe = proposer.observe

    def watched(found: Sequence[StepOutcome]) -> None:
        outcomes.extend(found)
        observe(found)

    monkeypatch.setattr(proposer, "observe", watched)
    for _ in range(2):
        assert tokens(run(engine, scenario)) == expected
    drafted = sum(outcome.num_drafted for outcome in outcomes)
    accepted = sum(outcome.num_accepted for outcome in outcomes)
    assert drafted > accepted > 0.1 * drafted > 20
    branches = [o for o in outcomes if o.accepted != tuple(range(o.num_accepted))]
    assert len(branches) > 10 if kind == "tree" else not branches


def test_what_was_foreseen_belongs_to_the_row_of_the_request(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each verified text stands what came next, with accepted drafts and without.

    Which request a row is of, V1 and V2 tell in ways of their own; requests of other lengths come
    and go, so that rows move.
    """
    engine = make_engine(speculative_config=METHODS["recycling"])
    proposer = runner_of(engine).drafter._proposer
    propose = proposer.propose
    wrong, num_rows, num_behind_drafts = [], 0, 0

    def look(step: Any) -> Any:
        nonlocal num_rows, num_behind_drafts
        for request in step.requests:
            seen, text = request.next_tokens, request.token_ids.tolist()
            start = len(text) - len(request.new_tokens)
            for place in range(start, len(text)):
                # A draft that was rejected may end as the text does; one of the rows is its own.
                ends = (seen.contexts == (-1, *text[:place])[-2:]).all(axis=1)
                if text[place] not in seen.tokens[ends, 0]:
                    wrong.append((request.request_id, place))
                num_rows += 1
                num_behind_drafts += place > start
        return propose(step)

    monkeypatch.setattr(proposer, "propose", look)
    for _ in range(2):  # again, to draft what the first answers have shown
        run(engine, SCENARIOS["mixed_lengths"])
    assert not wrong
    assert num_rows > 200
    assert num_behind_drafts > 50


def runner_of(engine: Any) -> Any:
    """The model runner of an engine in this process."""
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner


def test_registry_has_no_test_drafters_outside() -> None:
    assert registry.BUILTIN["input_copy"].startswith("vllm_spec_ext.")
