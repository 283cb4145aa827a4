# SPDX-License-Identifier: Apache-2.0
"""The child's commands, on an engine that answers from a script."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spec_ext.bench import engine_process
from vllm_spec_ext.bench.engine_process import EngineServer
from vllm_spec_ext.bench.measure import StepOutput
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.records import EngineCounters, EngineFacts


class Worker:
    """An engine whose worker records a row for each output, the last ten at most."""

    def __init__(self) -> None:
        self.llm = self
        self.active: list[str] = []
        self.rows: list[int] = []
        self.num_rows = 0
        self.times: tuple[float, ...] = (1.0, 2.0)
        self.now = 0.0
        self.calls: list[str] = []
        self.facts: EngineFacts | None = None

    def forget(self) -> None:
        self.calls.append("forget")

    def encode(self, messages: Any) -> list[int]:
        return [1]

    def add(self, request_id: str, token_ids: Any, seed: int) -> None:
        self.active.append(request_id)

    def step(self) -> list[StepOutput]:
        self.num_rows += 1
        self.now += 1.0
        self.rows = [*self.rows, self.num_rows][-10:]
        done = self.num_rows % 7 == 0
        name = self.active.pop() if done else self.active[-1]
        return [StepOutput(name, [1], done)]

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(name)
        rows, self.rows = self.rows, []
        return [rows]

    def propose_us(self) -> tuple[float, ...]:
        return self.times

    def counters(self) -> EngineCounters:
        return EngineCounters()


def serving(worker: Worker, pipe: Any) -> EngineServer:
    """Six questions for this worker."""
    server = EngineServer(pipe)
    server.engine = worker  # type: ignore[assignment]
    server.questions = [Question(i, "a", ({"role": "user", "content": "x"},)) for i in range(6)]
    return server


def test_a_recording_loses_no_step_and_shows_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_process, "MAX_STEPS", 10)
    worker = Worker()
    sent: list[Any] = []
    server = serving(worker, SimpleNamespace(send=sent.append))
    found = server.record(range(6), 1)
    assert found["steps"] == list(range(1, 43))
    assert found["propose_us"] == [1.0, 2.0]
    assert worker.calls[:2] == ["forget", "spec_ext_record"]
    assert worker.calls[-1] == "spec_ext_record"
    assert [kind for kind, _ in sent] == ["progress"] * 6


def test_an_engine_that_takes_steps_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of a batch may end together, long after they began."""
    worker = Worker()
    sent: list[Any] = []
    monkeypatch.setattr(engine_process.time, "monotonic", lambda: worker.now)
    server = serving(worker, SimpleNamespace(send=sent.append))
    server.answers(range(6), 6)
    kinds = [kind for kind, _ in sent]
    assert kinds.count("alive") == 4  # in 42 s
    assert kinds[0] == "progress"  # of the first answer, after seven steps
    sent.clear()
    monkeypatch.setattr(engine_process, "BEAT_S", 0.0)
    worker.facts = EngineFacts("float32", True, "cpu", 1.0)
    server.prepare(server.questions, 1, 1)
    assert [kind for kind, _ in sent] == ["alive"] * (6 + 7)  # six prompts read, seven steps


class Others:
    """The other end of the pipe, which has the machine between two turns."""

    def __init__(self, worker: Worker, answer: str, seconds: float = 100.0) -> None:
        self.worker, self.answer, self.seconds = worker, answer, seconds
        self.sent: list[str] = []
        self.in_flight: list[int] = []

    def send(self, message: tuple[str, object]) -> None:
        self.sent.append(message[0])

    def recv(self) -> tuple[str, tuple[()]]:
        self.worker.now += self.seconds
        self.in_flight.append(len(self.worker.active))
        return self.answer, ()


def test_a_pass_in_turns_keeps_its_requests_and_stops_its_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()
    others = Others(worker, "go_on")
    monkeypatch.setattr(engine_process.time, "perf_counter", lambda: worker.now)
    worker.times = (10.0, 100e6, 20.0)  # one draft was stopped in its middle
    run = serving(worker, others).run(range(6), 2, turn=2)
    assert others.sent == ["progress", "progress", "turn"] * 2 + ["progress"] * 2
    assert others.in_flight == [1, 1]
    assert run.wall_s == worker.num_rows == 42
    assert max(turn.wall_s for one in run.questions for turn in one.turns) <= 42
    assert max(s for one in run.questions for turn in one.turns for s in turn.step_s) <= 42
    assert run.propose_us == (10.0, 20.0)
    assert worker.calls == ["forget"]


def test_a_stop_with_nobody_waiting_hides_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    others = Others(worker, "go_on", seconds=0.001)
    monkeypatch.setattr(engine_process.time, "perf_counter", lambda: worker.now)
    worker.times = (5_000.0, 9_000.0)
    assert serving(worker, others).run(range(6), 2, turn=2).propose_us == worker.times


def test_a_benchmark_may_end_between_two_turns() -> None:
    worker = Worker()
    with pytest.raises(SystemExit):
        serving(worker, Others(worker, "stop")).run(range(6), 1, turn=4)


@pytest.mark.parametrize("stop", [None, 143])
def test_the_process_ends_at_once_when_its_engine_has_ended(
    stop: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    def serve(pipe: object) -> None:
        done.append("served")
        if stop is not None:  # SIGTERM, as main makes it an exception
            raise SystemExit(stop)

    monkeypatch.setattr(engine_process.sys, "argv", ["engine_process", "0", "1"])
    monkeypatch.setattr(engine_process, "watch", lambda fd: None)
    monkeypatch.setattr(engine_process, "Connection", lambda fd: None)
    monkeypatch.setattr(engine_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(engine_process, "serve", serve)
    monkeypatch.setattr(engine_process.atexit, "_run_exitfuncs", lambda: done.append("cleaned up"))
    monkeypatch.setattr(engine_process.os, "_exit", done.append)
    engine_process.main()
    assert done == ["served", "cleaned up", stop or 0]
