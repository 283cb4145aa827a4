# SPDX-License-Identifier: Apache-2.0
"""The planner's command line, without engines."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_spec_ext.bench import engine_client
from vllm_spec_ext.bench.draft_plan import DraftModelFacts
from vllm_spec_ext.bench.engine_client import EngineFailed
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.planner import RecordedStep, Recording, StepTimes
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.bench.step_probe import SHAPES, Shape, parents_of
from vllm_spec_ext.cli import plan as plan_module
from vllm_spec_ext.cli import plan_drafts
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.cli.plan import Recorded
from vllm_spec_ext.errors import SpecExtError

TIMES = StepTimes({1: {0: 0.1, 8: 0.12}, 8: {0: 0.1, 8: 1.0}})
FULL = Recording((tuple(RecordedStep(i, 8, 6 * (i % 2)) for i in range(4)),), 5e-5)


@given(st.sampled_from(SHAPES), st.integers(0, 70))
def test_shapes_are_trees_of_that_size(shape: Shape, size: int) -> None:
    parents = parents_of(shape, size)
    assert len(parents) == size
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    roots = parents.count(-1)
    assert roots == {"chain": min(1, size), "star": size}.get(shape, roots)
    if shape == "wide":
        assert roots == min(4, size)
    if shape == "binary" and size:
        assert max(parents.count(node) for node in range(-1, size)) <= 2


def test_prints_step_times_and_gains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    asked: list[Any] = []

    def times(settings: BenchSettings, nodes: Any, context: int, shapes: Any, _: Path) -> Any:
        asked.extend([settings.batch_size, nodes, context, shapes])
        return {"chain": TIMES}

    def record(method: Method, *_: Any) -> Recorded:
        return Recorded(method, {1: FULL, 8: FULL}, 99.6)

    monkeypatch.setattr(plan_module, "measure_times", times)
    monkeypatch.setattr(plan_module, "record_method", record)
    plot, data = tmp_path / "plan.svg", tmp_path / "plan.json"
    method = 'input_copy={"num_speculative_tokens": 8}'
    words = ["--method", method, "--plot", str(plot), "--json", str(data)]
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "m", *words])
    assert stop.value.code == 0
    assert asked == [[1, 8], [0, 1, 2, 4, 8], 100, ("chain",)]
    printed = capsys.readouterr().out
    assert "| batch | 0 | 8 |" in printed
    assert "| 8 | 100.0 (1.00) | 1000.0 (10.00) |" in printed
    assert "| input_copy | 1 | 4.00 | 8.0 | 50 | 3.33x |" in printed
    assert "| input_copy | 8 | 4.00 | 8.0 | 50 | 0.40x |" in printed
    assert "input_copy (batch 8), accepted per position: 0.50 0.50 0.50" in printed
    drawn = plot.read_text(encoding="utf-8")
    assert ">step, ms<" in drawn
    assert ">position in the draft<" in drawn
    found = json.loads(data.read_text(encoding="utf-8"))
    assert found["step_seconds"]["1"]["8"] == 0.12
    assert found["gains"][0]["acceptance_per_position"][0] == 0.5


def test_chains_and_trees_are_priced_each_by_its_own_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What a method gains does not depend on which others are planned beside it."""
    dear = StepTimes(
        {size: {n: 3 * s for n, s in row.items()} for size, row in TIMES.table.items()}
    )
    mixed = {size: {**dear.table[size], 0: row[0]} for size, row in TIMES.table.items()}

    def record(method: Method, *_: Any) -> Recorded:
        branches = method.name == "tree"
        steps = [
            [dataclasses.replace(s, branches=branches) for s in each] for each in FULL.requests
        ]
        found = dataclasses.replace(FULL, requests=tuple(map(tuple, steps)))
        return Recorded(method, {1: found, 8: found}, 99.6)

    monkeypatch.setattr(plan_module, "record_method", record)
    monkeypatch.setattr(
        plan_module, "measure_times", lambda *_: {"chain": TIMES, "wide": StepTimes(mixed)}
    )
    data = tmp_path / "plan.json"
    words = ["--method", "input_copy", "--method", 'tree={"method": "suffix_tree"}']
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "m", *words, "--json", str(data)])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "| input_copy | 1 | 4.00 | 8.0 | 50 | 3.33x |" in printed
    assert "| tree | 1 | 4.00 | 8.0 | 50 | 1.11x |" in printed
    assert "with four branches" in printed
    found = json.loads(data.read_text(encoding="utf-8"))
    assert found["step_seconds"]["1"]["8"] == 0.12
    assert found["step_seconds_with_branches"]["1"]["8"] == pytest.approx(0.36)
    assert [row["branches"] for row in found["gains"]] == [False, False, True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "ngram"], "only this plugin's methods record their drafts"),
        (["--batch-size", "0,1"], "batch size 0 is not positive"),
        (["--prompts", "none.jsonl"], "cannot read prompts"),
        (["--batch-size", "200,300"], "24 prompts never fill a batch of 200, 300"),
        (["--batch-size", "4", "--limit", "2"], "2 prompts never fill a batch of 4"),
        (["--tree", "4,1"], "name some by --drafts"),
        (["--pair", "a=0.1"], "name some by --drafts"),
        (["--chain", "8"], "name some by --drafts"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "m", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def draft_facts(name: str, right: list[bool], forward_s: float) -> DraftModelFacts:
    ranks = (np.where(right, 0, 1),)
    return DraftModelFacts(name, 2, 1_500_000, ranks, {1: forward_s, 8: forward_s})


def test_ranks_draft_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = {
        "deep/": draft_facts("deep/", [True, True, True, False], 0.09),
        "flat/": draft_facts("flat/", [True, False, True, False], 0.01),
    }
    asked: list[Any] = []

    def times(settings: BenchSettings, nodes: Any, context: int, shapes: Any, _: Path) -> Any:
        (shape,) = shapes
        asked.append((settings.model, list(nodes), context, shape))
        step = found[settings.model].forward_s[1] if settings.model in found else 0.1
        table = {size: dict.fromkeys(nodes, step) for size in settings.batch_size}
        return {shape: StepTimes(table)}

    def acceptance(draft: str, answers: Path, dtype: str, path: Path) -> DraftModelFacts:
        recorded = json.loads(answers.read_text())
        assert recorded == {"target": "m", "answers": [[[1, 2], [3, 4, 5, 6]]]}
        return dataclasses.replace(found[draft], forward_s={})

    monkeypatch.setattr(plan_module, "measure_times", times)
    monkeypatch.setattr(plan_drafts, "measure_acceptance", acceptance)
    monkeypatch.setattr(plan_drafts, "record_answers", lambda *_: [([1, 2], [3, 4, 5, 6])])
    data = tmp_path / "plan.json"
    words = ["--drafts", "deep/", "flat/", "deep/+flat/", "--chain", "3", "--json", str(data)]
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "m", "--pair", "big=0.5", "--tree", "2,1,1", *words])
    assert stop.value.code == 0
    assert asked == [
        ("m", [0, 1, 2, 4, 8, 12], 4, "chain"),
        ("deep/", [0], 4, "chain"),
        ("flat/", [0], 4, "chain"),
    ]
    printed = capsys.readouterr().out
    assert "| deep/ | 2 | 1.5M | 0.750 | 4.00 | 90.0 | 90.0 |" in printed
    assert "| deep/+flat/ | 4 | 3.0M | 0.750 | 4.00 | 100.0 | 100.0 |" in printed
    # 4 tokens in 2 steps of 1 + 0.1, or in one of 1 + 3 * 0.9.
    assert "| 1 | flat/ | 1 | 2.00 | 1.82x |" in printed
    assert "| 2 | deep/ | 3 | 4.00 | 1.08x |" in printed
    assert "| deep/ | 1.60x (3) |" in printed
    assert "| flat/ | 2 1 1 | 6 | 2.00 | 1.54x | 1.54x | 0.80x |" in printed
    assert "| deep/+flat/ | 2 1 1 | 12 |" in printed
    whole = json.loads(data.read_text(encoding="utf-8"))
    assert whole["trees"][0]["expansion"] == [2, 1, 1]
    assert whole["ranking"]["8"][0]["draft"] == "flat/"
    assert whole["drafts"][0]["acceptance_per_position"] == [1.0, 1.0, 0.5]
    assert whole["pairs"][0]["ratio"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafts", "a", "--method", "input_copy"], "drop --method"),
        (["--drafts", "a", "a"], "given twice"),
        (["--drafts", "a+"], "several with"),
        (["--drafts", "a", "--pair", "x"], "expected NAME=RATIO"),
        (["--drafts", "a", "--tree", "9"], "expected the children"),
    ],
)
def test_bad_drafts(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "m", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_settings_that_do_not_fit_are_bad_input_in_its_process_too(tmp_path: Path) -> None:
    settings = BenchSettings(model="m", engine_args={"max_model_len": 64})
    with pytest.raises(SpecExtError, match="raise it or lower --context") as error:
        plan_module.measure_times(settings, [0, 8], 256, ["chain"], tmp_path)
    assert not isinstance(error.value, EngineFailed)


def test_a_measurement_ends_with_the_command_that_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[-1]).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    written = tmp_path / "pid"
    code = (
        "from pathlib import Path\n"
        "from vllm_spec_ext.bench.own_process import measure_apart\n"
        f"measure_apart('sleeper', [], Path({str(written)!r}), 'nothing')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        wait_until(lambda: written.is_file() and written.read_text() != "")
    finally:
        command.kill()
        command.wait()
    pid = int(written.read_text())
    wait_until(lambda: not psutil.pid_exists(pid))


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_draft_that_cannot_be_measured(tmp_path: Path) -> None:
    """Its process says what is wrong with it: bad input, not a failed engine."""
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps({"target": str(tmp_path), "answers": [[[1], [2]]]}))
    with pytest.raises(SpecExtError, match="cannot load the tokenizer") as error:
        plan_drafts.measure_acceptance(str(tmp_path), answers, "float32", tmp_path / "out.json")
    assert not isinstance(error.value, EngineFailed)


@pytest.mark.parametrize("label", ["a/b", "../a", "a" * 300, "größer: 2"])
def test_a_label_may_hold_what_a_file_name_may_not(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "CHILD_MODULE", "this")  # ends at once
    folder = tmp_path / "logs"
    folder.mkdir()
    method = Method(label, {"method": "input_copy"})
    settings = BenchSettings(model=str(tmp_path), batch_size=[1])
    with pytest.raises(EngineFailed):
        plan_module.record_method(method, settings, [], folder)
    assert [path.parent for path in tmp_path.rglob("*.log")] == [folder]
