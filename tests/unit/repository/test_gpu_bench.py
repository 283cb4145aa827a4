# SPDX-License-Identifier: Apache-2.0
"""``make gpu-bench`` but for its engines: what is kept, what is measured again, what is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_bench import __main__ as command_line
from gpu_bench.measuring import conditions_of, measure_missing
from gpu_bench.parts_folder import Measured, PartsFolder
from gpu_bench.plan import ASYNC, PARTS, SYNC, Part, chosen
from gpu_check.machine import Gpu
from vllm_spec_ext.bench.engine_client import EngineFailed
from vllm_spec_ext.bench.records import (
    EngineCounters,
    EngineFacts,
    EngineRun,
    QuestionRecord,
    Run,
    TurnRecord,
)
from vllm_spec_ext.bench.session import BenchResult
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.errors import SpecExtError, UnknownNameError

GPU = Gpu("NVIDIA H200", "570.10", "9.0", 143771, 12)
CONDITIONS = {"gpu": "H200", "dtype": "float32"}
SETTINGS = BenchSettings(model="m", limit=2, batch_size=[1], repeats=1)


def measured(name: str, tokens: Sequence[int] = (5, 6, 7)) -> Measured:
    turn = TurnRecord(3, tuple(tokens), (1, len(tokens) - 1), 0.1, 0.3, (0.1, 0.2))
    records = tuple(QuestionRecord(i, "code", (turn,)) for i in range(2))
    run = EngineRun(records, 0.6, EngineCounters(), None, 1 << 20)
    return Measured(EngineFacts("float32", True, "NVIDIA H200", 30.0), [Run(name, 1, 0, run)])


def result_of(parts: Sequence[Part]) -> BenchResult:
    return BenchResult(SETTINGS, [part.method for part in parts], SETTINGS.questions())


class Engines:
    """Stands in for the measuring of a part."""

    def __init__(self, dies_at: str | None = None) -> None:
        self.dies_at = dies_at
        self.started: list[str] = []

    def __call__(self, part: Part) -> Measured:
        self.started.append(part.name)
        if part.name == self.dies_at:
            raise EngineFailed("out of memory")
        return measured(part.name)


def test_names_of_parts() -> None:
    assert chosen([]) == list(PARTS)
    assert [part.name for part in chosen(["auto"])] == ["plain", "auto"]
    with pytest.raises(UnknownNameError, match="auto_sync"):
        chosen(["auto_asnc"])
    plain, *others = PARTS
    assert (plain.method.config, plain.engine_args) == (None, {}), "vLLM as it comes"
    assert {part.name for part in others if part.engine_args == ASYNC} >= {"suffix_tree_async"}


def test_a_part_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    folder = PartsFolder(tmp_path / "parts", CONDITIONS)
    assert folder.find("plain") is None
    folder.keep("plain", measured("plain"))
    assert PartsFolder(tmp_path / "parts", CONDITIONS).find("plain") == measured("plain")
    folder.forget(["plain", "auto"])
    assert folder.find("plain") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "A100"}, "gpu: found 'H200', expected 'A100'"),
        ({"seed": 1}, "seed: found None, expected 1"),
    ],
)
def test_parts_of_other_conditions_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    PartsFolder(tmp_path, CONDITIONS).keep("plain", measured("plain"))
    with pytest.raises(SpecExtError, match="--fresh") as caught:
        PartsFolder(tmp_path, CONDITIONS | change).find("plain")
    assert message in str(caught.value)


@pytest.mark.parametrize("change", [{"format": "old"}, {"facts": None}, {"runs": [{}]}, None])
def test_damaged_parts_are_refused(change: dict[str, Any] | None, tmp_path: Path) -> None:
    folder = PartsFolder(tmp_path, CONDITIONS)
    folder.keep("plain", measured("plain"))
    path = folder.path("plain")
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpecExtError, match=r"plain\.json"):
        folder.find("plain")


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    parts = chosen(["input_copy", "auto"])
    folder, said = PartsFolder(tmp_path, CONDITIONS), list[str]()
    first, engines = result_of(parts), Engines(dies_at="auto")
    measure_missing(parts, folder, first, engines, said.append)
    assert engines.started == ["plain", "input_copy", "auto"]
    assert first.failures == {"auto": "out of memory"}
    assert "auto: FAILED: out of memory" in said
    second, engines = result_of(parts), Engines()
    measure_missing(parts, folder, second, engines, said.append)
    assert engines.started == ["auto"], "the part that failed is tried again"
    assert not second.failures
    assert [run.method for run in second.runs] == ["plain", "input_copy", "auto"]
    assert [summary.method for summary in second.summaries()] == ["plain", "input_copy", "auto"]


def test_an_interrupted_run_keeps_what_was_measured(tmp_path: Path) -> None:
    parts = chosen(["input_copy"])
    folder = PartsFolder(tmp_path, CONDITIONS)

    def interrupted(part: Part) -> Measured:
        if part.name == "input_copy":
            raise KeyboardInterrupt
        return measured(part.name)

    with pytest.raises(KeyboardInterrupt):
        measure_missing(parts, folder, result_of(parts), interrupted, print)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.json"]


def test_nothing_is_measured_beside_a_part_of_other_conditions(tmp_path: Path) -> None:
    parts = chosen(["input_copy"])
    PartsFolder(tmp_path, {"gpu": "A100"}).keep("input_copy", measured("input_copy"))
    engines = Engines()
    with pytest.raises(SpecExtError, match="A100"):
        measure_missing(parts, PartsFolder(tmp_path, CONDITIONS), result_of(parts), engines, print)
    assert engines.started == []


def test_conditions_hold_what_changes_a_figure() -> None:
    facts = {"versions": {"vllm": "0.32.0"}, "git_sha": "abc"}
    machine = {"name": "H200", "driver": "570"}

    def of(**changes: Any) -> dict[str, Any]:
        settings = SETTINGS.model_copy(update=changes)
        return conditions_of(settings, settings.questions(), machine, facts)

    assert of() == json.loads(json.dumps(of()))
    for change in ({"max_tokens": 9}, {"limit": 1}, {"dtype": "float16"}, {"batch_size": [2]}):
        assert of(**change) != of()
    assert of()["gpu"] == "H200"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Engines:
    engines = Engines()
    monkeypatch.setattr(command_line, "find_gpu", lambda: GPU)
    monkeypatch.setattr(command_line, "require_cuda_build", lambda: None)
    monkeypatch.setattr(command_line, "measure_part", lambda part, *_: engines(part))
    return engines


def test_the_command_writes_one_json_and_goes_on(on_a_gpu: Engines, tmp_path: Path) -> None:
    line = ["--model", "m", "--limit", "2", "--out", str(tmp_path), "--batch-size", "1"]
    on_a_gpu.dies_at = "auto"
    assert command_line.main([*line, "input_copy", "auto"]) == 1
    on_a_gpu.dies_at = None
    on_a_gpu.started.clear()
    assert command_line.main([*line, "input_copy", "auto"]) == 0
    assert on_a_gpu.started == ["auto"]
    found = json.loads((tmp_path / "gpu-bench.json").read_text())
    assert found["machine"]["name"] == "NVIDIA H200"
    assert [one["method"] for one in found["summaries"]] == ["plain", "input_copy", "auto"]
    assert found["engine_args"]["suffix_tree_async"] == ASYNC
    assert "| plain" in (tmp_path / "gpu-bench.md").read_text()
    on_a_gpu.started.clear()
    assert command_line.main([*line, "auto", "--fresh"]) == 0
    assert on_a_gpu.started == ["plain", "auto"]


def test_heads_are_measured_where_there_are_some(on_a_gpu: Engines, tmp_path: Path) -> None:
    line = ["--limit", "2", "--out", str(tmp_path), "--batch-size", "1", "blockwise"]
    assert command_line.main([*line, "--model", "m"]) == 2, "no heads of this model"
    assert command_line.main([*line, "--model", "m", "--heads", "h"]) == 0
    assert on_a_gpu.started == ["plain", "blockwise"]
    found = json.loads((tmp_path / "gpu-bench.json").read_text())
    assert found["engine_args"]["blockwise_sync"] == SYNC


def test_answers_that_differ_in_float32_fail(
    on_a_gpu: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(part: Part, *_: object) -> Measured:
        return measured(part.name, (5, 6, 7) if part.name == "plain" else (5, 6, 8))

    monkeypatch.setattr(command_line, "measure_part", wrong)
    line = ["--model", "m", "--limit", "2", "--out", str(tmp_path), "--batch-size", "1"]
    assert command_line.main([*line, "auto"]) == 1
    assert "NOT IDENTICAL" in (tmp_path / "gpu-bench.md").read_text()


def test_bad_input_ends_with_2(on_a_gpu: Engines, tmp_path: Path, capsys: Any) -> None:
    line = ["--model", "m", "--out", str(tmp_path)]
    assert command_line.main([*line, "no_such_part"]) == 2
    assert command_line.main([*line, "--batch-size", "many"]) == 2
    assert command_line.main([*line, "--dtype", "int3"]) == 2
    assert on_a_gpu.started == []
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_interrupted(on_a_gpu: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Measured:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "measure_part", interrupted)
    assert command_line.main(["--model", "m", "--out", str(tmp_path)]) == 130


def test_a_machine_is_described_without_what_changes(
    on_a_gpu: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory in use must not make a repeated run refuse its own parts."""
    line = ["--model", "m", "--limit", "2", "--out", str(tmp_path), "auto"]
    assert command_line.main(line) == 0
    monkeypatch.setattr(command_line, "find_gpu", lambda: replace(GPU, used_mib=99))
    on_a_gpu.started.clear()
    assert command_line.main(line) == 0
    assert on_a_gpu.started == []
