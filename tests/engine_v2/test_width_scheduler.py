# SPDX-License-Identifier: Apache-2.0
"""Drafts that do not pay rest, in an engine that is scheduled asynchronously; no token changes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from generation import run, tokens
from scenarios import PROMPTS, Scenario
from test_greedy_identity import runner_of

from vllm_spec_ext.engine.starting import scheduling
from vllm_spec_ext.engine.v2.late_tables import width_choice
from vllm_spec_ext.engine.v2.late_tables.width_scheduler import WidthScheduler

FEW = {"allowed_token_ids": [40, 42, 44], "ignore_eos": True}
SCENARIO = Scenario([{"max_tokens": n, **FEW} for n in (80, 80, 80, 76, 80, 80, 80, 80)], PROMPTS)


class Clock:
    """Steps with drafts take as much more as is said."""

    def __init__(self) -> None:
        self.now, self.cost, self.scheduler = 0.0, 1.0, None

    def __call__(self) -> float:
        self.now += 0.01 * (self.cost if self.verifies else 1.0)
        return self.now

    verifies = False


@pytest.fixture(scope="module")
def expected(plain: Any) -> Any:
    return tokens(run(plain, SCENARIO))


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "has_gpu", lambda: True)
        yield make_engine(speculative_config={"method": "input_copy"}, seed=3)


@pytest.fixture
def scheduler(engine: Any) -> Any:
    found = engine.llm_engine.engine_core.engine_core.scheduler
    assert isinstance(found, WidthScheduler)
    assert runner_of(engine).late_steps is not None
    engine.collective_rpc("spec_ext_reset")
    engine.reset_prefix_cache()
    return found


def widths(engine: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch, cost: float) -> list[int]:
    """Draft tokens of each step from now on, with drafts at this cost."""
    clock, seen = Clock(), list[int]()
    clock.cost = cost
    choice = width_choice.WidthChoice(clock)
    monkeypatch.setattr(scheduler, "_width_choice", choice)
    drafts_next = choice.drafts_next

    def note(num_requests: int, num_verified: int, *, only_decodes: bool) -> bool:
        clock.verifies = num_verified > 0
        seen.append(num_verified)
        return drafts_next(num_requests, num_verified, only_decodes=only_decodes)

    monkeypatch.setattr(choice, "drafts_next", note)
    return seen


def test_what_pays_goes_on(
    expected: Any, engine: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = widths(engine, scheduler, monkeypatch, cost=1.0)
    assert tokens(run(engine, SCENARIO)) == expected
    assert max(seen) > 8 * (len(PROMPTS) - 1), "the largest batch, too"
    assert sum(map(bool, seen)) > 0.4 * len(seen)


def test_what_does_not_pay_rests(
    expected: Any, engine: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = widths(engine, scheduler, monkeypatch, cost=9.0)
    drafting = []
    for _ in range(7):  # they are tried again in the fifth and the sixth
        seen.clear()
        assert tokens(run(engine, SCENARIO)) == expected
        drafting.append(sum(map(bool, seen)) / len(seen))
    assert drafting[0] > 0.3
    assert drafting[-1] < 0.1


def test_again_and_with_others_beside(
    plain: Any, engine: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts come and go by the step; grammars, seeds and penalties beside them."""
    mixed = Scenario(
        [
            {"max_tokens": 40, "temperature": 1.0, "seed": 7, **FEW},
            {"max_tokens": 20, "structured_outputs": {"regex": "(ab|cd){3,9}[0-9]+x"}},
            {"max_tokens": 30, "presence_penalty": 1.0, "frequency_penalty": 0.5, **FEW},
            {"max_tokens": 45, **FEW},
        ],
        PROMPTS,
    )
    answers = tokens(run(plain, mixed))
    turns = iter(range(1_000_000))

    class EveryThird(width_choice.WidthChoice):
        def drafts_next(self, *arguments: Any, **named: Any) -> bool:
            return next(turns) % 3 != 1

    monkeypatch.setattr(scheduler, "_width_choice", EveryThird())
    for scenario in (mixed, replace(mixed, prompts=PROMPTS[:3])):
        number = len(scenario.prompts)
        assert tokens(run(engine, scenario)) == answers[:number]
