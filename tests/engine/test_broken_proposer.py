# SPDX-License-Identifier: Apache-2.0
"""A proposer that fails in every way costs drafts, and nothing else."""

import logging
from typing import Any

import pytest
from generation import run, tokens
from scenarios import SCENARIOS
from test_greedy_identity import runner_of
from worker_counts import kept_counts

from vllm_spec_ext.engine.drafting import barrier
from vllm_spec_ext.environment import STRICT
from vllm_spec_ext.errors import ProposerError
from vllm_spec_ext.proposers.base import Draft, StepContext, chain


@pytest.mark.parametrize("name", ["mixed_lengths", "seeded", "several_samples", "json_schema"])
def test_the_engine_goes_on(
    name: str, make_engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(STRICT)
    expected = tokens(run(make_engine(), SCENARIOS[name]))
    engine = make_engine(speculative_config={"method": "broken"})
    counted = kept_counts(runner_of(engine), monkeypatch)
    # vLLM's loggers pass nothing on to the root logger, where caplog listens.
    monkeypatch.setattr(barrier, "logger", logging.getLogger("barrier"))
    with caplog.at_level(logging.ERROR):
        assert tokens(run(engine, SCENARIOS[name])) == expected
    found = counted()["counts"]
    assert found["refused_drafts"] > 20
    assert "drafted_nodes" not in found
    messages = [r.message for r in caplog.records if "proposer 'broken'" in r.message]
    assert len(messages) == len(set(messages))  # each kind is logged once
    if name == "mixed_lengths":  # the first to run; later ones find everything said
        for kind in ("propose() raised KeyError", "observe() raised", "found id", "parents:"):
            assert any(kind in message for message in messages), kind


def test_what_a_proposer_writes_into_a_request_gives_it_no_more_room(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(speculative_config={"method": "noise", "adaptive_length": False})
    made = []

    def take_more(step: StepContext) -> list[Draft]:
        for request in step.requests:
            made.append(request.room)
            request.room = 500
        return [chain([7] * 500) for _ in step.requests]

    monkeypatch.setattr(runner_of(engine).drafter._proposer, "propose", take_more)
    expected = tokens(run(make_engine(), SCENARIOS["mixed_lengths"]))
    assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected
    assert max(made) == 8


@pytest.mark.parametrize("how", ["pop", "assign"])
def test_a_proposer_that_takes_requests_away_costs_drafts_alone(
    how: str, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STRICT)
    engine = make_engine(speculative_config={"method": "noise", "adaptive_length": False})
    asked: Any = []

    def take_away(step: Any) -> list[Draft]:
        asked.append(len(step.requests))
        drafts = [chain([7]) for _ in step.requests]
        if how == "pop":
            step.requests.pop()
        step.requests = step.requests[1:]
        return drafts[1:]

    monkeypatch.setattr(runner_of(engine).drafter._proposer, "propose", take_away)
    expected = tokens(run(make_engine(), SCENARIOS["mixed_lengths"]))
    assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected
    assert max(asked) > 1


def test_strictness_is_for_developers(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(speculative_config={"method": "broken"})
    drafter = runner_of(engine).drafter
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(ProposerError, match=r"proposer 'broken': finish\(\) raised RuntimeError"):
        drafter.finish(["a"])
