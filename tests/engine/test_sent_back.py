# SPDX-License-Identifier: Apache-2.0
"""Requests that are sent back in the middle of a draft come back and go on with the same tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
from generation import count_preempted, run, sampling_params, tokens
from scenarios import PROMPTS, Scenario
from test_greedy_identity import METHODS

NAMES = ("oracle", "oracle_tree")
LENGTHS = (12, 40, 33, 25)
SCENARIO = Scenario([{"max_tokens": n, "ignore_eos": True} for n in LENGTHS], PROMPTS)


@pytest.fixture(scope="module")
def answers(plain: Any) -> list[list[int]]:
    return [completions[0] for completions in tokens(run(plain, SCENARIO))]


def generate(
    engine: Any,
    truths: Sequence[Sequence[int]],
    *,
    told_by: str = "truth",
    resets: Sequence[int] = (),
    priorities: Sequence[int] = (0,),
    starts: Sequence[int] = (0,),
) -> list[list[int]]:
    """Answers to all prompts.

    Args:
        engine: An ``LLM``.
        truths: The true answers.
        told_by: The request option that tells the drafter.
        resets: Steps before which all running requests are sent back, and the prefix cache emptied.
        priorities: Of the requests, in turns; 0 goes first.
        starts: Steps before which the requests come, in turns.
    """
    core, found = engine.llm_engine, {}
    for step in range(1000):
        for i, prompt in enumerate(PROMPTS):
            if starts[i % len(starts)] == step:
                params = SCENARIO.params[i % len(SCENARIO.params)]
                asked = sampling_params(params, {told_by: list(truths[i])})
                priority = priorities[i % len(priorities)]
                core.add_request(f"back-{i}", prompt, asked, priority=priority)
        if step in resets:
            assert core.reset_prefix_cache(reset_running_requests=True)
        for out in core.step():
            if out.finished:
                place = int(out.request_id.removeprefix("back-"))
                found[place] = list(out.outputs[0].token_ids)
        if step >= max(starts) and not core.has_unfinished_requests():
            break
    return [found[place] for place in range(len(PROMPTS))]


@pytest.mark.parametrize("name", NAMES)
def test_by_an_empty_cache(
    name: str, answers: list[list[int]], make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where weights change in training, all that runs is computed again."""
    engine = make_engine(speculative_config=METHODS[name])
    preempted = count_preempted(engine, monkeypatch)
    assert generate(engine, answers, resets=(2, 3, 5)) == answers
    assert len(preempted) > len(PROMPTS)


@pytest.mark.parametrize("name", NAMES)
def test_by_requests_that_go_first(
    name: str, answers: list[list[int]], make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a step has places for already give them up again, with their drafts."""
    engine = make_engine(
        speculative_config=METHODS[name],
        num_gpu_blocks_override=16,
        scheduling_policy="priority",
    )
    preempted = count_preempted(engine, monkeypatch)
    found = generate(engine, answers, priorities=(2, 1, 0), starts=(0, 1, 4))
    assert found == answers
    assert preempted
