# SPDX-License-Identifier: Apache-2.0
"""Steps that are read one step late, without an engine: who left meanwhile, and who waits."""

import threading
from abc import ABC
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from test_v2_parts import new, scheduled
from vllm.v1.outputs import ModelRunnerOutput

from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.v2.known_requests import KnownRequests
from vllm_spec_ext.engine.v2.late_tables.design import scheduling, why_waiting
from vllm_spec_ext.engine.v2.late_tables.late_steps import LateSteps
from vllm_spec_ext.engine.v2.late_tables.told_output import tell_both
from vllm_spec_ext.engine.watching.counts import WorkerCounts
from vllm_spec_ext.engine.watching.stat_channel import KEY


class Output(ABC):  # noqa: B024
    """vLLM's, which may be read once."""

    def __init__(self, tokens: list[list[int]]) -> None:
        names = [f"r{i}" for i in range(len(tokens))]
        self.answer = ModelRunnerOutput(names, {}, tokens)
        self.num_read = 0

    def get_output(self) -> ModelRunnerOutput:
        self.num_read += 1
        return self.answer


class Runner:
    """What late steps need of one."""

    def __init__(self, names: list[str], *, leads: bool = True) -> None:
        self.device = torch.device("cpu")
        self.speculative_config = SimpleNamespace(num_speculative_tokens=3)
        self.drafter = SimpleNamespace(counts=WorkerCounts(), ranks=SimpleNamespace(leads=leads))
        self.spec_requests = KnownRequests()
        self.spec_requests.schedule(scheduled([new(name, [1, 2], 2, [0]) for name in names], {}))
        states: list[Any] = [SimpleNamespace(draft=None) for _ in names]
        drafts = [[-1] * 3 for _ in names]
        self.spec_step = Step(tuple(names), drafts, [4] * len(names), states=states)
        self.step_drafts = self
        self.made: list[tuple[Step, list[list[int]]]] = []

    def make(self, step: Step, new_tokens: list[list[int]], *_: Any) -> None:
        """Drafts are those of requests that are known."""
        assert all(
            name in self.spec_requests
            for name, d in zip(step.request_ids, step.drafts, strict=True)
            if d
        )
        self.made.append((step, new_tokens))

    def tokens(self, name: str) -> list[int]:
        return self.spec_requests.get(name).token_ids.tolist()


def batch(*names: str) -> Any:
    return SimpleNamespace(req_ids=list(names))


def late_steps(runner: Any) -> LateSteps:
    return LateSteps(runner)


def test_a_step_is_told_once_with_the_tokens_of_those_that_stayed() -> None:
    runner = Runner(["a", "b", "c"])
    late, output = late_steps(runner), Output([[5, 6], [7], [8]])
    told = late.queue(output, batch("a", "b", "c"), 3)
    assert not told.is_told
    late.read_if_told()
    assert runner.made == []
    # One leaves; another one comes back under its name, with what it had said.
    runner.spec_requests.forget(["b", "c"])
    runner.spec_requests.schedule(scheduled([new("c", [1, 2, 3], 2, [0])], {}))
    late.read()
    late.read()
    [(step, new_tokens)] = runner.made
    assert new_tokens == [[5, 6], [], []]
    assert step.drafts == [[-1] * 3, [], []]
    assert runner.tokens("a") == [1, 2, 5, 6]
    assert runner.tokens("c") == [1, 2, 3]
    assert output.answer.sampled_token_ids == [[5, 6], [7], [8]], "vLLM's answer stays as it is"


def test_a_rank_that_follows_keeps_the_tokens_and_tells_no_proposer() -> None:
    runner = Runner(["a", "b"], leads=False)
    late = late_steps(runner)
    late.queue(Output([[5, 6], [7]]), batch("a", "b"), 3)
    late.read()
    assert runner.made == []
    assert (runner.tokens("a"), runner.tokens("b")) == ([1, 2, 5, 6], [1, 2, 7])


def test_what_vllm_has_read_is_read_at_once() -> None:
    runner = Runner(["a"])
    late = late_steps(runner)
    told = late.queue(Output([[5]]), batch("a"), 3)
    told.get_output()
    late.read_if_told()
    assert runner.tokens("a") == [1, 2, 5]


def test_vllms_output_is_read_once_and_carries_what_was_counted_before() -> None:
    output, counts = Output([[5]]), WorkerCounts()
    counts.add(steps=2)
    told = tell_both(output, counts.take())
    counts.add(steps=1)
    answers: list[ModelRunnerOutput] = []
    threads = [threading.Thread(target=lambda: answers.append(told.get_output())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert output.num_read == 1
    assert all(answer is answers[0] for answer in answers)
    stats: Any = answers[0].kv_connector_output
    assert stats.kv_connector_stats.data[KEY]["counts"] == {"steps": 2.0}
    assert counts.take()["counts"] == {"steps": 1.0}


DRAFTER = {
    "models": (),
    "views": (),
    "not_late_because": None,
}
SETTINGS = {"online": None, "rule": None}


@pytest.mark.parametrize(
    ("drafter", "settings", "reason"),
    [
        ({}, {}, None),
        ({"not_late_because": "its tables are too large"}, {}, "its tables are too large"),
        ({"models": ("one",)}, {}, "by running models"),
        ({}, {"online": "folder"}, "learns while it serves"),
        ({}, {"rule": SimpleNamespace(is_strict=False)}, "a relaxed rule"),
        ({}, {"rule": SimpleNamespace(is_strict=True)}, None),
    ],
)
def test_why_an_engine_waits(
    drafter: dict[str, Any], settings: dict[str, Any], reason: str | None
) -> None:
    one: Any = SimpleNamespace(**{**DRAFTER, **drafter})
    found = why_waiting(one, SimpleNamespace(**{**SETTINGS, **settings}))  # type: ignore[arg-type]
    assert (found is None) == (reason is None)
    line = scheduling(None, found)
    assert (reason or "made on the device") in line
    assert scheduling("asked for", found) == "synchronous scheduling (asked for)"
    assert "docs/gpu.md" in scheduling("asked for", found, may_be_async=True)
