# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling: the scheduler runs ahead, drafts are made in the worker.

It has every request draft as many tokens in every step, and knows none of them.
"""

from typing import Any

import pytest
from generation import count_preempted, run, sampling_params, tokens
from scenarios import PROMPTS, Scenario
from test_greedy_identity import METHODS, runner_of

NAMES = ("oracle", "oracle_tree")
SCENARIO = Scenario([{"max_tokens": n, "ignore_eos": True} for n in (12, 40, 33, 1)], PROMPTS)


@pytest.fixture(scope="module")
def answers(plain: Any) -> Any:
    return run(plain, SCENARIO)


def truths(answers: Any) -> list[list[int]]:
    return [completions[0] for completions in tokens(answers)]


def start(make_engine: Any, method: str, **arguments: Any) -> Any:
    return make_engine(speculative_config=METHODS[method], async_scheduling=True, **arguments)


def steps_of(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows of each step from now on, and the requests that it gave tokens to."""
    runner, rows = runner_of(engine), []
    make = runner.step_drafts.make

    def count(step: Any, new_tokens: Any, *args: Any) -> Any:
        rows.append((sum(step.num_scheduled), sum(map(bool, new_tokens))))
        return make(step, new_tokens, *args)

    monkeypatch.setattr(runner.step_drafts, "make", count)
    return rows


@pytest.mark.parametrize("method", NAMES)
def test_same_tokens_in_as_few_steps(
    method: str, answers: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(make_engine, method)
    assert engine.llm_engine.vllm_config.scheduler_config.async_scheduling
    assert runner_of(engine).is_async
    ahead = steps_of(engine, monkeypatch)
    for _ in range(2):  # then from the prefix cache
        assert tokens(run(engine, SCENARIO, truths(answers))) == tokens(answers)
    waiting = make_engine(speculative_config=METHODS[method])
    behind = steps_of(waiting, monkeypatch)
    for _ in range(2):
        assert tokens(run(waiting, SCENARIO, truths(answers))) == tokens(answers)
    # A request that stops takes part in one step more, which was queued before that was known.
    assert len(ahead) <= len(behind) + len(PROMPTS)
    of_requests = [sum(given for _, given in steps) for steps in (ahead, behind)]
    assert of_requests[0] - len(PROMPTS) <= 1.03 * of_requests[1]  # no draft is lost


def test_trees_of_auto_are_filled_up(answers: Any, make_engine: Any) -> None:
    """What the target says of the rows that fill a tree up is of no use to anyone."""
    config = {**METHODS["auto"], "copy_input": False}  # copies alone would be looked up late
    engine = make_engine(speculative_config=config, async_scheduling=True)
    assert runner_of(engine).late_steps is None
    for _ in range(2):
        assert tokens(run(engine, SCENARIO)) == tokens(answers)


def test_no_clock_holds_drafts_back(
    answers: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens are verified of every request, so there is nothing to save."""
    counts = []
    for adaptive in (False, True):
        config = {**METHODS["oracle"], "adaptive_length": adaptive}
        engine = make_engine(speculative_config=config, async_scheduling=True)
        steps = steps_of(engine, monkeypatch)
        assert tokens(run(engine, SCENARIO, truths(answers))) == tokens(answers)
        counts.append(len(steps))
    assert counts[1] <= counts[0] + 2


# Each beside plain requests, one of each kind, so that few steps show all.
MIXED = Scenario(
    [
        {"max_tokens": 20, "temperature": 1.0, "seed": 7},
        {"max_tokens": 20, "structured_outputs": {"regex": "(ab|cd){3,9}[0-9]+x"}},
        {"max_tokens": 20, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"max_tokens": 20, "temperature": 0.7, "seed": 8, "top_k": 20, "logprobs": 2},
    ],
    PROMPTS,
)


@pytest.mark.parametrize("method", NAMES)
def test_sampling_grammars_and_penalties(method: str, plain: Any, make_engine: Any) -> None:
    answers = run(plain, MIXED)
    engine = start(make_engine, method)
    assert tokens(run(engine, MIXED, truths(answers))) == tokens(answers)


@pytest.mark.parametrize("behind_each_step", [True, False])
def test_a_prompt_of_one_token_has_no_log_probabilities(
    behind_each_step: bool, make_engine: Any
) -> None:
    """vLLM fills such a request up to the length of the others, and takes the rows for prompt."""
    config = METHODS["oracle_tree" if behind_each_step else "input_copy"]
    config = {**config, "num_speculative_tokens_per_batch_size": None}
    core = make_engine(speculative_config=config, async_scheduling=True).llm_engine
    core.add_request("running", PROMPTS[0], sampling_params({"max_tokens": 20}))
    core.step()
    asked = sampling_params({"max_tokens": 3, "prompt_logprobs": 1})
    core.add_request("short", {"prompt_token_ids": [9]}, asked)
    found: dict[str, Any] = {}
    while core.has_unfinished_requests():
        found |= {out.request_id: out for out in core.step() if out.finished}
    assert found["short"].prompt_logprobs == [None]


def test_the_last_token_behind_cached_blocks_has_none_either(make_engine: Any) -> None:
    config = {**METHODS["oracle_tree"], "num_speculative_tokens_per_batch_size": None}
    core = make_engine(
        speculative_config=config, async_scheduling=True, enable_prefix_caching=True, block_size=32
    ).llm_engine
    prompt = {"prompt_token_ids": [*range(20, 53)]}
    core.add_request("before", prompt, sampling_params({"max_tokens": 1}))
    core.step()
    core.add_request("running", PROMPTS[0], sampling_params({"max_tokens": 20}))
    core.step()
    asked = {"max_tokens": 3, "prompt_logprobs": 1, "skip_reading_prefix_cache": False}
    core.add_request("cached", prompt, sampling_params(asked))
    found: dict[str, Any] = {}
    while core.has_unfinished_requests():
        found |= {out.request_id: out for out in core.step() if out.finished}
    assert found["cached"].num_cached_tokens == 32
    assert found["cached"].prompt_logprobs == [None]


def test_preemption(plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario([{"max_tokens": 50, "ignore_eos": True}], PROMPTS)
    answers = run(plain, scenario)
    engine = start(make_engine, "oracle_tree", num_gpu_blocks_override=12)
    preempted = count_preempted(engine, monkeypatch)
    assert tokens(run(engine, scenario, truths(answers))) == tokens(answers)
    assert preempted


WIDTHS = [[1, 1, 7], [2, 3, 3], [4, 8, 0]]
"""Fewer draft tokens for more requests, none for four."""


@pytest.mark.parametrize("method", NAMES)
def test_a_width_for_each_batch_size(
    method: str, answers: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's `num_speculative_tokens_per_batch_size`: requests draft what the step before said."""
    config = {
        **METHODS[method],
        "num_speculative_tokens": 7,
        "num_speculative_tokens_per_batch_size": WIDTHS,
    }
    engine = make_engine(speculative_config=config, async_scheduling=True)
    runner = runner_of(engine)
    widths: set[tuple[int, int]] = set()
    make = runner.step_drafts.make

    def note(step: Any, *args: Any) -> Any:
        widths.update((len(step.drafts), len(draft)) for draft in step.drafts)
        return make(step, *args)

    monkeypatch.setattr(runner.step_drafts, "make", note)
    for _ in range(2):
        assert tokens(run(engine, SCENARIO, truths(answers))) == tokens(answers)
    # The batch of the step before decides, so a step can be as wide as for one request more.
    assert {width for _, width in widths} <= {7, 3, 0}
    assert {(1, 7), (2, 3), (4, 0)} <= widths


def test_what_fills_drafts_up_is_no_draft(answers: Any, make_engine: Any) -> None:
    """Outcomes tell of what was drafted, not of the last token repeated behind it."""
    engine = start(make_engine, "oracle")
    proposer = runner_of(engine).drafter._proposer
    proposer.outcomes.clear()
    proposer.wrong_paths.clear()
    assert tokens(run(engine, SCENARIO, truths(answers))) == tokens(answers)
    assert proposer.wrong_paths == []
    sizes = {outcome.num_drafted for outcome in proposer.outcomes}
    assert len(sizes) > 3
    assert all(0 <= o.num_accepted <= o.num_drafted for o in proposer.outcomes)
