# SPDX-License-Identifier: Apache-2.0
"""Cascades whose last level is the target over a view of its cache: TriForce, and others."""

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
from generation import count_preempted, run, run_with_aborts, same_tokens_twice, tokens
from homogeneity import same_distribution_p_value
from sampling_distributions import SAME, samples_of
from scenarios import (
    LONG,
    LONG_PROMPT,
    LONG_PROMPT_SIZES,
    LONG_SIZES,
    PROMPTS,
    SCENARIOS,
    SEVERAL,
    Scenario,
)
from test_cache_view_engine import CROWDED
from test_cascade_engine import Watch
from test_greedy_identity import runner_of
from test_models_oracle import FREE
from test_token_tree_engine import save_noisy

from vllm_spec_ext.proposers.payoff.forward_payoff import Retries

PART = {"view": "retrieval", "budget": 64, "sink": 0, "recent": 32}
LEVELS: dict[str, list[dict[str, Any]]] = {
    "triforce": [{"model": "near", "view": "stream", "budget": 64, "sink": 32}, PART],
    "stream": [{"model": "near"}, {"view": "stream", "budget": 64}],
    "copies": [{"method": "input_copy"}, {**PART, "reviews": 3, "refresh": 4}],
    "four": [
        {"method": "adaptive_ngram", "min_confidence": 0.0},
        {"model": "near", "reviews": 3},
        {**PART, "reviews": [2, 2]},
    ],
    "full": [{"model": "near"}, {"view": "full"}],
}


@pytest.fixture(scope="module")
def near(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that often says what the target says."""
    return save_noisy(tiny_model, tmp_path_factory.mktemp("drafts") / "near", 0.05, 1)


TRIFORCE: dict[str, Any] = {
    "method": "cascade",
    "preset": "triforce",
    "draft_on_cpu": True,
    "adaptive_length": False,
}


@pytest.fixture(scope="module")
def engines(make_engine: Any, near: str) -> Callable[..., Any]:
    def make(name: str, *, engine: dict[str, Any] | None = None, **options: Any) -> Any:
        levels = [{**level, "model": near} if "model" in level else level for level in LEVELS[name]]
        config = {**TRIFORCE, "levels": levels, "num_speculative_tokens": 8, **options}
        return make_engine(speculative_config=config, **(engine or {}))

    return make


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def test_the_target_accepts_all_that_a_full_view_writes(
    engines: Any, expected: dict[str, Any], expected_long: Any, watch: Watch
) -> None:
    """In mixed batches, beside chunked prefill, after prefix hits, with `n` > 1."""
    for scenario in FREE:
        watch.outcomes.clear()
        assert tokens(run(engines("full"), SCENARIOS[scenario])) == expected[scenario], scenario
        num_right, num_missed = watch.rights("full")
        assert num_missed == 0, scenario
        assert num_right > 20, scenario
    watch.outcomes.clear()
    assert tokens(run(engines("full", engine=LONG_SIZES), LONG)) == expected_long
    num_right, num_missed = watch.rights("full")
    assert num_missed == 0
    assert num_right > 150


@pytest.mark.parametrize("name", LEVELS)
def test_same_tokens(name: str, engines: Any, expected: dict[str, Any]) -> None:
    for scenario in SCENARIOS if name == "triforce" else SEVERAL:
        assert tokens(run(engines(name), SCENARIOS[scenario])) == expected[scenario], scenario


@pytest.mark.parametrize("name", LEVELS)
def test_same_tokens_of_long_prompts(
    name: str, engines: Any, expected_long: Any, watch: Watch
) -> None:
    """Twice: the second time prompts are found in the prefix cache."""
    engine = engines(name, engine=LONG_SIZES)
    same_tokens_twice(engine, expected_long)
    (view,) = runner_of(engine).drafter.views.views
    assert sum(len(makers) for _, makers, _ in watch.outcomes) > 300
    assert all(set(makers) == {view.spec.name} for _, makers, _ in watch.outcomes)
    # Reviews of several tokens, some of which were taken back.
    assert view.counts.rows > 1.5 * view.counts.forwards


@pytest.mark.parametrize("name", ["triforce", "copies", "full"])
def test_preemption(
    name: str, engines: Any, plain: Any, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = tokens(run(plain, CROWDED))
    engine = engines(name, engine={"num_gpu_blocks_override": 20})
    preempted = count_preempted(engine, monkeypatch)
    for _ in range(2):
        assert tokens(run(engine, CROWDED)) == want
    assert preempted
    if name == "full":
        assert watch.rights("full")[1] == 0


@pytest.mark.parametrize("budget", [512, 64])
def test_a_draft_model_that_streams(
    budget: int, make_engine: Any, expected_long: Any, watch: Watch, tiny_model: Path
) -> None:
    """The target drafts for itself, and all of that is right if nothing is hidden."""
    itself = {"model": str(tiny_model), "view": "stream", "budget": budget, "reviews": 3}
    config = {
        "method": "cascade",
        "levels": [{"method": "ngram"}, itself],
        "adaptive_length": False,
        "num_speculative_tokens": 6,
    }
    engine = make_engine(speculative_config=config, **LONG_SIZES)
    for _ in range(2):
        assert tokens(run(engine, LONG)) == expected_long
    num_right, num_missed = watch.rights(tiny_model.name)
    assert num_right > 300
    assert (num_missed == 0) == (budget == 512)


def test_aborted_requests_leave_nothing_behind(engines: Any, expected_long: Any) -> None:
    engine = engines("triforce", engine=LONG_SIZES)
    engine.reset_prefix_cache()  # else they may have ended by then
    finished = run_with_aborts(engine, LONG, (0, 4), at_step=4)
    assert finished == {i: answer[0] for i, answer in enumerate(expected_long) if i not in (0, 4)}
    short = Scenario([{"max_tokens": 2}], PROMPTS[:1])
    run(engine, short)  # vLLM tells of ends in the next step
    run(engine, short)
    (view,) = runner_of(engine).drafter.views.views
    assert len(view._choices) == 0
    assert len(view._free_places) == LONG_SIZES["max_num_seqs"]
    assert len(runner_of(engine).drafter._proposer._waiting) <= 1


def test_same_tokens_where_clocks_decide(
    engines: Any, expected_long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("triforce", engine=LONG_SIZES, adaptive_length=True)
    monkeypatch.setattr(Retries, "due", lambda self: True)
    for _ in range(3):
        assert tokens(run(engine, LONG)) == expected_long
    (view,) = runner_of(engine).drafter.views.views
    assert view.counts.forwards > 0


def test_it_drafts_nothing_on_cpus_unless_told_to(
    engines: Any, expected: dict[str, Any], watch: Watch
) -> None:
    engine = engines("triforce", draft_on_cpu=False)
    assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected["mixed_lengths"]
    drafter = runner_of(engine).drafter
    assert not drafter.views
    assert not drafter.models
    assert drafter.scratch_need.most == 0
    assert all(outcome.num_drafted == 0 for outcome, *_ in watch.outcomes)


# -- sampling -------------------------------------------------------------------------------------

DRAWN = {"temperature": 1.3, "top_k": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def sample(make_engine: Any, near: str) -> Callable[[str], list[Hashable]]:
    """Samples of the first tokens by an engine that drafts so, or "plain"."""

    def draw(name: str) -> list[Hashable]:
        drafts = {"levels": [{"model": near}, PART], "tokens": [3], "num_speculative_tokens": 4}
        config = None if name == "plain" else TRIFORCE | drafts
        return samples_of(make_engine, DRAWN, config, LONG_PROMPT, **LONG_PROMPT_SIZES)

    return draw


@pytest.fixture(scope="module")
def plain_sample(sample: Any) -> list[Hashable]:
    return sample("plain")


def test_drawn_drafts_keep_the_targets_distribution(
    sample: Any, plain_sample: list[Hashable], watch: Watch
) -> None:
    found = sample("triforce")
    accepted = sum(outcome.num_accepted for outcome, *_ in watch.outcomes)
    assert sum(is_drawn for *_, is_drawn in watch.outcomes) > 0.9 * len(watch.outcomes)
    assert accepted >= 2000
    assert same_distribution_p_value(plain_sample, found) > SAME
