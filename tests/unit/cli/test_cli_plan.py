# SPDX-License-Identifier: Apache-2.0
"""The planner's command line, without engines."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.planner import RecordedStep, Recording, StepTimes
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.bench.step_probe import SHAPES, Shape, parents_of
from vllm_spec_ext.cli import plan as plan_module
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.cli.plan import Recorded

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

    def times(settings: BenchSettings, nodes: Any, context: int, shape: str, _: Path) -> Any:
        asked.extend([settings.batch_size, nodes, context, shape])
        return TIMES

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
    assert asked == [[1, 8], [0, 1, 2, 4, 8], 100, "chain"]
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "ngram"], "only this plugin's methods record their drafts"),
        (["--batch-size", "0,1"], "batch size 0 is not positive"),
        (["--prompts", "none.jsonl"], "cannot read prompts"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "m", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
