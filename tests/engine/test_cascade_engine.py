# SPDX-License-Identifier: Apache-2.0
"""`cascade` on a real engine: same text, same distribution, right drafts."""

import json
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
from generation import count_preempted, run, run_with_aborts, sampling_params, tokens
from homogeneity import same_distribution_p_value
from sampling_distributions import DIFFERENT, SAME, samples_of
from save_drafts import save_draft
from scenarios import PROMPTS, SCENARIOS, Scenario
from test_greedy_identity import runner_of
from test_models_oracle import FREE
from test_token_tree_engine import save_noisy

from vllm_spec_ext.proposers.base import Draft, StepContext, StepOutcome
from vllm_spec_ext.proposers.cascade import Cascade, judging

STEADY = {"method": "cascade", "adaptive_length": False}

METHODS: dict[str, dict[str, Any]] = {
    "copies": {
        "levels": [{"method": "input_copy"}, {"model": "self", "reviews": 4}],
        "num_speculative_tokens": 8,
    },
    "ngrams": {
        "levels": [
            {"method": "adaptive_ngram", "min_confidence": 0.0},
            {"model": "other", "reviews": 3},
            {"model": "self", "reviews": 4},
        ],
        "num_speculative_tokens": 7,
    },
    "models": {
        "levels": [{"model": "other"}, {"model": "self", "reviews": 2}],
        "num_speculative_tokens": 5,
    },
    "horizontal": {
        "levels": [{"method": "ngram"}, {"model": "other"}, {"model": "self", "reviews": 0}],
        "tokens": [2, 3, 3],
        "num_speculative_tokens": 8,
    },
    "cs_drafting": {
        "levels": [{"model": "other"}, {"model": "self"}],
        "preset": "cs_drafting",
        "num_speculative_tokens": 16,
    },
}
EXACT = [name for name in METHODS if name != "cs_drafting"]  # without lenience


@pytest.fixture(scope="module")
def drafts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "self": str(tiny_model),
        "other": save_draft(tiny_model, folder / "other", num_hidden_layers=1),
        "near": save_noisy(tiny_model, folder / "near", 0.05, 1),
        "nearby": save_noisy(tiny_model, folder / "nearby", 0.05, 2),
        "more_ids": save_draft(tiny_model, folder / "more_ids", vocab_size=640),
    }


def with_folders(config: dict[str, Any], drafts: dict[str, str]) -> dict[str, Any]:
    levels = [
        {**level, "model": drafts[level["model"]]} if "model" in level else level
        for level in config["levels"]
    ]
    return {**STEADY, **config, "levels": levels}


@pytest.fixture(scope="module")
def engines(make_engine: Any, drafts: dict[str, str]) -> Callable[..., Any]:
    def make(name: str, **more: Any) -> Any:
        return make_engine(speculative_config=with_folders(METHODS[name], drafts), **more)

    return make


class Watch:
    """What became of the drafts, and who wrote them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.outcomes: list[tuple[StepOutcome, tuple[str, ...], bool]] = []
        made: dict[str, Draft] = {}
        propose, observe = Cascade.propose, Cascade.observe

        def proposing(cascade: Cascade, step: StepContext) -> list[Draft]:
            drafts = propose(cascade, step)
            made.update(
                (request.request_id, draft)
                for request, draft in zip(step.requests, drafts, strict=True)
            )
            return drafts

        def observing(cascade: Cascade, outcomes: Sequence[StepOutcome]) -> None:
            for outcome in outcomes:
                draft = made[outcome.request_id]
                assert draft.sources is not None
                makers = tuple(name for (name,) in draft.sources)
                self.outcomes.append((outcome, makers, draft.probs is not None))
            observe(cascade, outcomes)

        patch.setattr(Cascade, "propose", proposing)
        patch.setattr(Cascade, "observe", observing)

    def rights(self, name: str) -> tuple[int, int]:
        """Verified tokens that a level wrote at the head of a draft; those that were rejected."""
        num_right = num_missed = 0
        for outcome, makers, _ in self.outcomes:
            length = next((i for i, maker in enumerate(makers) if maker != name), len(makers))
            length = min(length, outcome.num_drafted)
            num_right += length
            num_missed += max(0, length - outcome.num_accepted)
        return num_right, num_missed


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.mark.parametrize("name", EXACT)
def test_the_target_accepts_all_of_itself(
    name: str, engines: Any, expected: dict[str, Any], watch: Watch, tiny_model: Path
) -> None:
    """In mixed batches, beside chunked prefill, after prefix hits, with `n` > 1."""
    engine = engines(name)
    for scenario in FREE:
        watch.outcomes.clear()
        assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario], scenario
        num_right, num_missed = watch.rights(tiny_model.name)
        assert num_missed == 0, scenario
        assert num_right >= 15, scenario


# The free scenarios of most cascades are those above.
CASES = [
    (scenario, name)
    for scenario in SCENARIOS
    for name in METHODS
    if name == "cs_drafting" or scenario in ("penalties", "seeded", "json_schema")
]


@pytest.mark.parametrize(("scenario", "name"), CASES)
def test_same_tokens(scenario: str, name: str, engines: Any, expected: dict[str, Any]) -> None:
    assert tokens(run(engines(name), SCENARIOS[scenario])) == expected[scenario]


@pytest.mark.parametrize("name", ["copies", "ngrams", "horizontal"])
def test_preemption(
    name: str,
    engines: Any,
    plain: Any,
    watch: Watch,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = Scenario([{"max_tokens": 100, "ignore_eos": True}], PROMPTS)
    want = tokens(run(plain, scenario))
    engine = engines(name, num_gpu_blocks_override=16)
    preempted = count_preempted(engine, monkeypatch)
    assert tokens(run(engine, scenario)) == want
    assert preempted
    num_right, num_missed = watch.rights(tiny_model.name)
    assert num_missed == 0
    assert num_right > 200


@pytest.mark.parametrize("name", ["copies", "ngrams"])
def test_second_turns(name: str, engines: Any, plain: Any, watch: Watch, tiny_model: Path) -> None:
    """Answers become prompts: what was drafted and accepted is found in the prefix cache."""
    scenario = Scenario([{"max_tokens": 40, "ignore_eos": True}], PROMPTS)
    first = run(plain, scenario)
    turns = [
        {"prompt_token_ids": [*out.prompt_token_ids, *out.outputs[0].token_ids][:125]}
        for out in first
    ]
    params = sampling_params({"max_tokens": 30, "ignore_eos": True})
    want = tokens(plain.generate(turns, params, use_tqdm=False))
    engine = engines(name)
    run(engine, scenario)
    watch.outcomes.clear()
    outputs = engine.generate(turns, params, use_tqdm=False)
    assert tokens(outputs) == want
    assert sum(out.num_cached_tokens for out in outputs) > 300
    assert watch.rights(tiny_model.name)[1] == 0


@pytest.mark.parametrize("name", ["copies", "ngrams"])
def test_aborted_requests_leave_nothing_behind(
    name: str, engines: Any, expected: dict[str, Any]
) -> None:
    engine = engines(name)
    answers = {i: answer[0] for i, answer in enumerate(expected["mixed_lengths"])}
    aborted = sorted(answers, key=lambda i: len(answers[i]))[-2:]  # still running then
    finished = run_with_aborts(engine, SCENARIOS["mixed_lengths"], aborted, at_step=3)
    assert finished == {i: answers[i] for i in answers if i not in aborted}
    run(engine, SCENARIOS["batch_of_one"])
    proposer = runner_of(engine).drafter._proposer
    assert len(proposer._waiting) <= 1  # a step's request is freed at the start of the next one
    assert len(proposer._methods[0]._waiting) <= 1


def test_chunks_are_read_in_one_pass(engines: Any, watch: Watch) -> None:
    """Where text repeats itself, a model reads several tokens of a request in one pass."""
    engine = engines("copies")
    (model,) = runner_of(engine).drafter.models.models
    forwards, rows = model.counts.forwards, model.counts.rows
    run(engine, SCENARIOS["few_tokens"])
    written = sum(len(makers) for _, makers, _ in watch.outcomes)
    assert model.counts.rows - rows > 2 * (model.counts.forwards - forwards)
    assert written > 100


def test_what_does_not_pay_runs_no_pass(
    make_engine: Any, drafts: dict[str, str], expected: dict[str, Any]
) -> None:
    """A model slower than the target; first the engine measures, and drafts to see its cost."""
    config = with_folders(METHODS["copies"], drafts) | {"adaptive_length": True}
    engine = make_engine(speculative_config=config)
    scenario = SCENARIOS["batch_of_one"]
    (model,) = runner_of(engine).drafter.models.models
    model.forward_seconds = lambda num_rows: 1000.0
    long = sampling_params({"max_tokens": 120, "ignore_eos": True})
    engine.generate(scenario.prompts, long, use_tqdm=False)
    before = model.counts.forwards
    assert tokens(run(engine, scenario)) == expected["batch_of_one"]
    assert model.counts.forwards == before


def test_a_model_of_other_ids_is_cut_and_of_another_tokenizer_refused(
    make_engine: Any, drafts: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = {
        "levels": [{"method": "ngram"}, {"model": "more_ids"}, {"model": "self", "reviews": 4}],
        "num_speculative_tokens": 5,
    }
    engine = make_engine(speculative_config=with_folders(config, drafts))
    assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected["mixed_lengths"]
    foreign = save_draft(Path(drafts["self"]), tmp_path / "foreign", num_hidden_layers=1)
    file = Path(foreign) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    levels = [{"model": drafts["other"]}, {"model": foreign}]
    with pytest.raises(ValueError, match="draft model foreign"):
        make_engine(speculative_config={**STEADY, "levels": levels, "num_speculative_tokens": 4})


def test_a_seeded_text_does_not_depend_on_drafts(engines: Any, plain: Any) -> None:
    params = [
        sampling_params({"temperature": 1.0, "seed": seed, "max_tokens": 20}) for seed in range(6)
    ]
    texts = []
    for engine in (plain, engines("ngrams"), engines("cs_drafting")):
        outputs = engine.generate(["The dog"] * len(params), params, use_tqdm=False)
        texts.append(tokens(outputs))
    assert texts[0] == texts[1] == texts[2]


# Few outcomes, all of them likely; drafts are filtered alike, so that they hit these often.
DRAWN = {"temperature": 0.9, "top_k": 4, "ignore_eos": True}
SAMPLED: dict[str, dict[str, Any]] = {
    "copies": {
        "levels": [{"method": "input_copy", "source": "prompt"}, {"model": "near", "reviews": 2}],
        "num_speculative_tokens": 4,
    },
    "three": {
        "levels": [{"method": "ngram"}, {"model": "nearby"}, {"model": "near", "reviews": 2}],
        "num_speculative_tokens": 4,
    },
    "horizontal": {
        "levels": [{"method": "ngram"}, {"model": "nearby"}, {"model": "near", "reviews": 0}],
        "tokens": [2, 1, 1],
        "num_speculative_tokens": 4,
    },
}


@pytest.fixture(scope="module")
def sample(make_engine: Any, drafts: dict[str, str]) -> Callable[[str], list[Hashable]]:
    """Samples of the first tokens by an engine that drafts so, or "plain"."""

    def draw(name: str) -> list[Hashable]:
        config = None if name == "plain" else with_folders(SAMPLED[name], drafts)
        return samples_of(make_engine, DRAWN, config)

    return draw


@pytest.fixture(scope="module")
def plain_sample(sample: Any) -> list[Hashable]:
    return sample("plain")


@pytest.mark.parametrize("name", SAMPLED)
def test_drawn_drafts_keep_the_targets_distribution(
    name: str, sample: Any, plain_sample: list[Hashable], watch: Watch
) -> None:
    found = sample(name)
    accepted = sum(outcome.num_accepted for outcome, *_ in watch.outcomes)
    drafted = sum(outcome.num_drafted for outcome, *_ in watch.outcomes)
    assert sum(is_drawn for *_, is_drawn in watch.outcomes) > 0.9 * len(watch.outcomes)
    assert accepted >= 2000
    assert accepted < 0.9 * drafted  # the draft's distribution is another one
    assert same_distribution_p_value(plain_sample, found) > SAME


def test_a_rejected_token_replaced_from_the_whole_distribution_is_found_out(
    sample: Any, plain_sample: list[Hashable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TriForce's released rule; others: tests/unit/engine/test_cascade_is_exact.py."""
    monkeypatch.setattr(judging, "residual", lambda h, token, q0: h)
    assert same_distribution_p_value(plain_sample, sample("three")) < DIFFERENT
