# SPDX-License-Identifier: Apache-2.0
"""The child's commands, on an engine that answers from a script."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spec_ext.bench import engine_process
from vllm_spec_ext.bench.engine_process import EngineServer
from vllm_spec_ext.bench.measure import StepOutput
from vllm_spec_ext.bench.prompts import Question


class Worker:
    """An engine whose worker records a row for each output, the last ten at most."""

    def __init__(self) -> None:
        self.llm = self
        self.active: list[str] = []
        self.rows: list[int] = []
        self.num_rows = 0
        self.calls: list[str] = []

    def forget(self) -> None:
        self.calls.append("forget")

    def encode(self, messages: Any) -> list[int]:
        return [1]

    def add(self, request_id: str, token_ids: Any, seed: int) -> None:
        self.active.append(request_id)

    def step(self) -> list[StepOutput]:
        self.num_rows += 1
        self.rows = [*self.rows, self.num_rows][-10:]
        done = self.num_rows % 7 == 0
        name = self.active.pop() if done else self.active[-1]
        return [StepOutput(name, [1], done)]

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(name)
        rows, self.rows = self.rows, []
        return [rows]

    def propose_us(self) -> tuple[float, ...]:
        return (1.0, 2.0)


def test_a_recording_loses_no_step_and_shows_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_process, "MAX_STEPS", 10)
    sent: list[Any] = []
    server = EngineServer(SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    worker = Worker()
    server.engine = worker  # type: ignore[assignment]
    server.questions = [Question(i, "a", ({"role": "user", "content": "x"},)) for i in range(6)]
    found = server.record(range(6), 1)
    assert found["steps"] == list(range(1, 43))
    assert found["propose_us"] == [1.0, 2.0]
    assert worker.calls[:2] == ["forget", "spec_ext_record"]
    assert worker.calls[-1] == "spec_ext_record"
    assert [kind for kind, _ in sent] == ["progress"] * 6
