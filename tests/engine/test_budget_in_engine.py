# SPDX-License-Identifier: Apache-2.0
"""The draft budget at work in an engine; what it decides is tested without one."""

from typing import Any

import pytest
from generation import run, tokens
from scenarios import PROMPTS, Scenario
from test_greedy_identity import runner_of
from worker_counts import kept_counts

from vllm_spec_ext.engine.drafting.draft_budget import Allowance

SCENARIO = Scenario([{"max_tokens": 60, "ignore_eos": True}], PROMPTS[:1])
NOISE = {"method": "noise", "num_speculative_tokens": 8}


def test_a_fresh_engine_decodes_plainly_first_and_counts_drafting(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(run(make_engine(), SCENARIO))
    engine = make_engine(speculative_config={**NOISE, "adaptive_length": True})
    runner = runner_of(engine)
    counted = kept_counts(runner, monkeypatch)
    rooms: list[int] = []
    shadows: list[bool] = []
    draft = runner.drafter.draft

    def watched(step: Any, outcomes: Any, known: Any) -> Any:
        rooms.append(sum(request.room for request in step.requests))
        shadows.append(step.is_shadow)
        return draft(step, outcomes, known)

    runner.drafter.draft = watched
    truths = [outputs[0] for outputs in expected]
    assert tokens(run(engine, SCENARIO, truths)) == expected
    assert rooms[:3] == [0, 0, 0]
    assert shadows[:4] == [False, False, False, True]
    found = counted()["counts"]
    assert found["shadow_nodes"] >= 1
    assert not runner.step_drafts._shadows  # the request is gone
    assert not runner.step_drafts.budget.costs.needs_plain(1)
    assert runner.step_drafts.budget._shadowing
    assert found["held_back"] >= 3


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


def test_where_drafts_lose_time_a_proposer_reads_tokens_later_and_misses_none(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario([{"max_tokens": 100, "ignore_eos": True}], PROMPTS[:2])
    expected = tokens(run(make_engine(), scenario))
    engine = make_engine(speculative_config={**NOISE, "adaptive_length": True})
    runner = runner_of(engine)
    read: dict[str, list[int]] = {}
    told: dict[str, list[tuple[int, int]]] = {}
    draft = runner.drafter.draft

    def watched(step: Any, outcomes: Any, known: Any) -> Any:
        for request in step.requests:
            read.setdefault(request.request_id, []).extend(request.new_tokens)
            told.setdefault(request.request_id, []).append(
                (request.num_steps, len(request.new_tokens))
            )
        return draft(step, outcomes, known)

    runner.drafter.draft = watched
    truths = [outputs[0] for outputs in expected]
    runner.step_drafts.forget([*runner.step_drafts._unread._tokens])  # of earlier tests
    counted = kept_counts(runner, monkeypatch)
    assert tokens(run(engine, scenario, truths)) == expected
    for seen, truth in zip(read.values(), truths, strict=True):
        assert seen == truth[: len(seen)]
        assert len(seen) > len(truth) - 9  # the end of an answer may stay unread
    for steps in told.values():
        assert 1 < max(num_steps for num_steps, _ in steps) <= 8
        assert all(num_steps == num_tokens for num_steps, num_tokens in steps if num_steps > 1)
    found = counted()["counts"]
    # One of them may have left before the other, with some of its tokens unread.
    num_read = sum(len(seen) - 1 for seen in read.values())
    assert num_read <= found["emitted_tokens"] <= sum(len(truth) - 1 for truth in truths)
    assert found["held_back"] > 100  # steps that were not read, too
    gone = set(read)
    run(engine, SCENARIO, truths[:1])  # whose first step says that they are
    assert not gone & runner.step_drafts._unread._tokens.keys()
    (last,) = read.keys() - gone
    # What was never read is counted all the same, once its request is gone.
    emitted = found["emitted_tokens"] + counted()["counts"]["emitted_tokens"]
    assert emitted == sum(len(truth) - 1 for truth in truths) + len(read[last]) - 1


def test_outcomes_belong_to_the_newest_draft(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts may be verified while earlier ones of the same request are still followed."""
    oracle = {"method": "oracle", "num_speculative_tokens": 8, "wrong": 0.3}
    expected = tokens(run(make_engine(), SCENARIO))
    engine = make_engine(speculative_config={**oracle, "adaptive_length": True})
    runner = runner_of(engine)
    budget, drafter = runner.step_drafts.budget, runner.drafter
    newest: dict[str, int] = {}
    told: list[bool] = []
    draft = drafter.draft

    def allow(rooms: Any, is_following: bool = False) -> Allowance:
        budget._may_draft, budget._is_shadow = True, not is_following
        return Allowance(None, None, "a test", is_shadow=not is_following)

    def watched(step: Any, outcomes: Any, known: Any) -> Any:
        for outcome in (*outcomes, *known):
            assert outcome.num_drafted == newest[outcome.request_id]
            told.append(outcome.is_shadow)
        made = draft(step, outcomes, known)
        for request, one in zip(step.requests, made, strict=True):
            newest[request.request_id] = len(one) or newest.get(request.request_id, 0)
        return made

    monkeypatch.setattr(budget, "allow", allow)
    monkeypatch.setattr(drafter, "draft", watched)
    truths = [outputs[0] for outputs in expected]
    assert tokens(run(engine, SCENARIO, truths)) == expected
    assert told.count(True) > 0
    assert told.count(False) > 5
