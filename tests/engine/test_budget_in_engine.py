# SPDX-License-Identifier: Apache-2.0
"""The draft budget at work in an engine; what it decides is tested without one."""

from typing import Any

from generation import run, tokens
from scenarios import PROMPTS, Scenario
from test_greedy_identity import runner_of

from vllm_spec_ext.engine.watching.shared_counters import COUNTERS

SCENARIO = Scenario([{"max_tokens": 60, "ignore_eos": True}], PROMPTS[:1])
NOISE = {"method": "noise", "num_speculative_tokens": 8}


def counted(runner: Any, name: str) -> float:
    """What the worker counted."""
    return float(runner.drafter._counters._values[list(COUNTERS).index(name)])


def test_a_fresh_engine_decodes_plainly_first_and_counts_drafting(make_engine: Any) -> None:
    expected = tokens(run(make_engine(), SCENARIO))
    engine = make_engine(speculative_config={**NOISE, "adaptive_length": True})
    runner = runner_of(engine)
    rooms: list[int] = []
    shadows: list[bool] = []
    draft = runner.drafter.draft

    def watched(step: Any, outcomes: Any, known: Any, is_shadow: bool) -> Any:
        rooms.append(sum(request.room for request in step.requests))
        shadows.append(is_shadow)
        return draft(step, outcomes, known, is_shadow)

    runner.drafter.draft = watched
    truths = [outputs[0] for outputs in expected]
    assert tokens(run(engine, SCENARIO, truths)) == expected
    assert rooms[:3] == [0, 0, 0]
    assert shadows[:4] == [False, False, False, True]
    assert counted(runner, "shadow_nodes") >= 1
    assert not runner.step_drafts._shadows  # the request is gone
    assert not runner.step_drafts.budget.costs.needs_plain(1)
    assert runner.step_drafts.budget._drafting or not any(rooms)
    assert counted(runner, "held_back") >= 3


def test_switched_off_nothing_is_held_back(make_engine: Any) -> None:
    engine = make_engine(speculative_config=NOISE)
    runner = runner_of(engine)
    assert runner.step_drafts.budget is None
    expected = tokens(run(make_engine(), SCENARIO))
    before = len(runner.drafter._proposer.outcomes)
    run(engine, SCENARIO, [outputs[0] for outputs in expected])
    assert len(runner.drafter._proposer.outcomes) - before >= 50


def test_a_prompt_in_pieces_with_nothing_beside_it(make_engine: Any) -> None:
    alone = Scenario(SCENARIO.params, PROMPTS[4:5])
    pieces = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "enable_prefix_caching": False}
    expected = tokens(run(make_engine(**pieces), alone))
    engine = make_engine(speculative_config={**NOISE, "adaptive_length": True}, **pieces)
    for _ in range(2):  # the second time costs are known
        assert tokens(run(engine, alone, [outputs[0] for outputs in expected])) == expected
