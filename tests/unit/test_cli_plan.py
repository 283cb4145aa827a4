# SPDX-License-Identifier: Apache-2.0
"""The planner's command line, without engines."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_spec_ext.bench.methods import parse_method
from vllm_spec_ext.bench.planner import RecordedStep, StepTimes, plans
from vllm_spec_ext.bench.step_probe import SHAPES, Shape, parents_of
from vllm_spec_ext.cli import plan as plan_module
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.cli.plan import MethodPlan

TIMES = StepTimes({1: {0: 0.1, 8: 0.12}, 8: {0: 0.1, 8: 1.0}})
STEPS = [RecordedStep(8, tuple(range(6))), RecordedStep(8, ())]


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


def _found() -> MethodPlan:
    method = parse_method('input_copy={"max_ngram": 4}')
    return MethodPlan(method, 50.0, plans(STEPS, TIMES, 0.0, 8))


def test_recommended_configuration() -> None:
    assert _found().recommended == {
        "method": "input_copy",
        "max_ngram": 4,
        "num_speculative_tokens": 6,
        "num_speculative_tokens_per_batch_size": [(1, 7, 6), (8, 8, 0)],
    }


def test_prints_a_table_and_a_line_to_paste(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")

    def times(*_: Any) -> StepTimes:
        return TIMES

    def planned(*_: Any) -> MethodPlan:
        return _found()

    monkeypatch.setattr(plan_module, "measure_times", times)
    monkeypatch.setattr(plan_module, "plan_method", planned)
    plot, data = tmp_path / "plan.svg", tmp_path / "plan.json"
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "m", "--plot", str(plot), "--json", str(data)])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "batches 1 to 7: 6 draft tokens" in printed
    assert "batch 8: do not speculate" in printed
    assert '--speculative-config \'{"method": "input_copy"' in printed
    assert ">step, ms<" in plot.read_text(encoding="utf-8")
    found = json.loads(data.read_text(encoding="utf-8"))
    assert found["step_seconds"]["1"]["8"] == 0.12
    assert len(found["methods"]["input_copy"]["plans"]) == 6


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
