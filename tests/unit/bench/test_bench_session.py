# SPDX-License-Identifier: Apache-2.0
"""What the benchmark refuses to measure."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from vllm_spec_ext.bench import report, saved, session
from vllm_spec_ext.bench.engine_client import EngineFailed
from vllm_spec_ext.bench.markdown_table import markdown_table
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.records import (
    EngineCounters,
    EngineFacts,
    EngineRun,
    QuestionRecord,
    TurnRecord,
)
from vllm_spec_ext.bench.session import BenchResult, log_name
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.errors import SpecExtError


def test_a_full_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    left = session.MIN_FREE_BYTES
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=left))
    session._require_memory(7)
    left -= 1
    with pytest.raises(SpecExtError, match="511 MiB of memory are left with 7 engines"):
        session._require_memory(7)


SCORING = 1000  # where a FakeClient may fail


class FakeClient:
    """Answers every question in one step, and fails where it is told to."""

    def __init__(self, name: str, calls: list[tuple[str, list[int]]], fails_at: int) -> None:
        self.name, self.calls, self.fails_at = name, calls, fails_at
        self.log = "log"
        self.num_passes, self.stops_at_pass = 0, 0
        self.error: type[BaseException] = KeyboardInterrupt

    def run_in_turns(
        self, indices: range, concurrency: int, turn: int, on_answer: Any
    ) -> Iterator[EngineRun | None]:
        for begin in range(0, len(indices), turn):
            if begin:
                yield None
            some = indices[begin : begin + turn]
            self.calls.append((self.name, list(some)))
            if self.fails_at in some:
                raise EngineFailed("gone")
            if self.stops_at_pass and self.stops_at_pass == self.num_passes and begin == 0:
                raise self.error
            self.num_passes += begin == 0
        taken = TurnRecord(1, (1,), (1,), 0.1, 0.5, (0.1,))
        records = tuple(QuestionRecord(index, "all", (taken,)) for index in indices)
        yield EngineRun(records, 0.5 * len(records), EngineCounters(1, 2, 1), (7.0,), 10)

    def score(self, answers: Any) -> list[float]:
        if self.fails_at == SCORING:
            raise EngineFailed("out of memory")
        return [-1.0] * len(answers)

    def pause(self) -> None:
        pass

    def close(self) -> None:
        pass


def _play(num_questions: int, batch_size: int, fails_at: int = -1) -> tuple[BenchResult, Any]:
    question = Question(1, "all", ({"role": "user", "content": "x"},))
    methods = [Method("plain", None), Method("b", {"method": "ngram"})]
    settings = BenchSettings(model="m", methods=["plain"])
    result = BenchResult(settings, methods, [question] * num_questions)
    calls: list[tuple[str, list[int]]] = []
    clients: Any = {
        "plain": FakeClient("plain", calls, -1),
        "b": FakeClient("b", calls, fails_at),
    }
    session._run_in_turns(result, clients, batch_size, 1, session.Events())
    return result, calls


def test_engines_take_turns_within_a_pass() -> None:
    result, calls = _play(10, 1)
    one, two, three = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]
    assert calls == [
        ("b", one),
        ("plain", one),
        ("plain", two),
        ("b", two),
        ("b", three),
        ("plain", three),
    ]
    assert [(run.method, run.repeat) for run in result.runs] == [("b", 1), ("plain", 1)]
    for run in result.runs:
        assert [record.index for record in run.result.questions] == list(range(10))


def test_a_turn_is_at_least_a_batch() -> None:
    assert [call[1] for call in _play(10, 8)[1]] == [list(range(8))] * 2 + [[8, 9]] * 2


def test_a_method_that_fails_in_mid_pass_leaves_no_run() -> None:
    result, calls = _play(10, 1, fails_at=5)
    assert [run.method for run in result.runs] == ["plain"]
    assert "gone" in result.failures["b"]
    assert [call[1] for call in calls if call[0] == "b"] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def _play_all(
    monkeypatch: pytest.MonkeyPatch,
    plain_fails_at: int,
    stops_at_pass: int = 0,
    error: type[BaseException] = KeyboardInterrupt,
) -> BenchResult:
    """A whole benchmark of plain decoding and a lossy method."""
    clients: Any = {
        "plain": FakeClient("plain", [], plain_fails_at),
        "lossy": FakeClient("lossy", [], -1),
    }
    clients["lossy"].stops_at_pass = stops_at_pass
    clients["lossy"].error = error

    @contextlib.contextmanager
    def running(*_: object) -> Iterator[Any]:
        yield clients

    monkeypatch.setattr(session, "engines_running", running)
    facts = EngineFacts("float32", lossless=True, device="cpu", start_s=1.0)
    result = BenchResult(
        BenchSettings(model="m", methods=["plain", "lossy"], repeats=2),
        [Method("plain", None), Method("lossy", {"method": "lossy"})],
        [Question(1, "all", ({"role": "user", "content": "x"},))] * 4,
        {"plain": facts, "lossy": replace(facts, lossless=False)},
    )
    session.run_benchmark(result, Path(), session.Events())
    return result


@pytest.mark.parametrize("error", [KeyboardInterrupt, SpecExtError, OSError, SystemExit])
def test_an_interrupted_run_keeps_the_passes_that_are_complete(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a later turn is too long, or the display fails (a full disk, `2>&1 | head`)."""
    result = _play_all(monkeypatch, -1, stops_at_pass=1, error=error)
    assert result.interrupted
    assert type(result.stopped_by) is (type(None) if error is KeyboardInterrupt else error)
    assert [(run.method, run.repeat) for run in result.runs] == [("plain", 0), ("lossy", 0)]
    assert result.drifts == []
    assert "INTERRUPTED: 1 of 2 passes are complete and in these tables" in report.verdict_lines(
        result
    )


def test_drifts_of_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _play_all(monkeypatch, -1)
    assert [(drift.method, drift.log_prob) for drift in result.drifts] == [("lossy", -1.0)]
    assert result.failures == {}


@pytest.mark.parametrize(
    ("plain_fails_at", "runs_of_plain", "reason"),
    [(2, 0, "gone"), (SCORING, 2, "timed, but not every drift is measured: out of memory")],
)
def test_what_was_measured_outlives_plain_decoding(
    plain_fails_at: int, runs_of_plain: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = _play_all(monkeypatch, plain_fails_at)
    methods = [run.method for run in result.runs]
    assert (methods.count("plain"), methods.count("lossy")) == (runs_of_plain, 2)
    assert result.drifts == []
    assert reason in result.failures["plain"]
    assert "lossy" in markdown_table(*report.overview(result))
    assert any(
        f"FAILED plain: {result.failures['plain']}" in x for x in report.verdict_lines(result)
    )
    assert len(saved.to_json(result, {})["runs"]) == 2 + runs_of_plain


class Starting:
    """A client whose start says what it was told, and meets others that start just then."""

    told: ClassVar[list[tuple[str, int]]] = []
    meet: ClassVar[Barrier] = Barrier(1)

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log

    def start(self, model: str, method: Method, args: Any, sampling: Any, count: int) -> None:
        self.meet.wait(10)
        self.told.append((self.name, count))
        if self.name == "b":
            raise EngineFailed("no")

    def prepare(self, *_: object) -> EngineFacts:
        return EngineFacts("float32", True, "cpu", 1.0)

    def pause(self) -> None:
        pass

    begin_to_close = close = pause


@pytest.mark.parametrize("at_once", [1, 3])
def test_engines_start_in_turn_or_together_and_know_how_many_share_the_memory(
    at_once: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "EngineClient", Starting)
    monkeypatch.setattr(session, "_require_memory", lambda count: None)
    monkeypatch.setattr(Starting, "told", [])
    monkeypatch.setattr(Starting, "meet", Barrier(at_once))
    methods = [Method(name, None if name == "plain" else {}) for name in ("plain", "b", "c")]
    result = BenchResult(BenchSettings(model="m", methods=["plain"]), methods, [])
    with session.engines_running(result, tmp_path, session.Events(), at_once=at_once) as clients:
        assert list(clients) == list(result.facts) == ["plain", "c"]
    assert sorted(Starting.told) == [("b", 3), ("c", 3), ("plain", 3)]
    assert list(result.failures) == ["b"]


def test_every_engine_has_a_log_of_its_own() -> None:
    names = ["a/b", "a_b", "a b", "a" * 300, "a" * 301, "plain", "../plain"]
    files = [log_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert "plain.log" in files
    assert all(len(file.encode()) < 256 and Path(file).name == file for file in files)
