# SPDX-License-Identifier: Apache-2.0
"""The planner's command line, without engines."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_spec_ext.bench.methods import Method, parse_method
from vllm_spec_ext.bench.planner import RecordedStep, Recording, StepTimes
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.bench.step_probe import SHAPES, Shape, parents_of
from vllm_spec_ext.cli import plan as plan_module
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.cli.plan import MethodPlan, Recordings

TIMES = StepTimes({1: {0: 0.1, 8: 0.12}, 8: {0: 0.1, 8: 1.0}})
FULL = Recording((tuple(RecordedStep(i, 8, tuple(range(6 * (i % 2)))) for i in range(4)),), 5e-5)
TIMID = Recording((tuple(RecordedStep(i, 0, ()) for i in range(4)),), 5e-5)
CLEVER = Recording((tuple(RecordedStep(i, 6, tuple(range(6))) for i in range(4)),), 5e-5)


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


def _found(paying: Recording | None = None) -> MethodPlan:
    method = parse_method('input_copy={"max_ngram": 4, "num_speculative_tokens": 8}')
    own = {1: paying, 8: TIMID} if paying else None
    return plan_module.plan_method(Recordings(method, {1: FULL, 8: FULL}, own), TIMES)


def test_recommended_configuration() -> None:
    config = {"method": "input_copy", "max_ngram": 4}
    found = config | {
        "num_speculative_tokens": 6,
        "num_speculative_tokens_per_batch_size": [(1, 4, 6), (5, 8, 0)],
    }
    assert _found().recommended == found
    # The method's own choice is taken where it is as fast, else switched off.
    assert _found(CLEVER).recommended == config | {"num_speculative_tokens": 8}
    assert _found(TIMID).recommended == found | {"adaptive_length": False}


def test_no_configuration_where_nothing_pays() -> None:
    method = parse_method("input_copy")
    found = plan_module.plan_method(Recordings(method, {8: FULL}, None), TIMES)
    assert found.recommended is None


def test_prints_a_table_and_a_line_to_paste(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    asked: list[Any] = []

    def times(settings: BenchSettings, nodes: Any, context: int, shapes: Any, *_: Any) -> Any:
        asked.extend([settings.batch_size, context, shapes])
        return {"chain": TIMES}

    def record(method: Method, *_: Any) -> tuple[Recordings, float]:
        return Recordings(method, {1: FULL, 8: FULL}, {1: TIMID, 8: TIMID}), 99.6

    monkeypatch.setattr(plan_module, "measure_times", times)
    monkeypatch.setattr(plan_module, "record_method", record)
    plot, data = tmp_path / "plan.svg", tmp_path / "plan.json"
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "m", "--plot", str(plot), "--json", str(data)])
    assert stop.value.code == 0
    assert asked == [[1, 8], 100, {"chain"}]
    printed = capsys.readouterr().out
    assert "batches 1 to 4: 6 draft tokens" in printed
    assert "batches 5 to 8: do not speculate" in printed
    assert "accepted per position: 0.50 0.50 0.50" in printed
    assert "drafter: 50 us a step at batch 1, 50 us a step at batch 8" in printed
    assert '--speculative-config \'{"method": "input_copy", "adaptive_length": false' in printed
    assert ">step, ms<" in plot.read_text(encoding="utf-8")
    found = json.loads(data.read_text(encoding="utf-8"))["methods"]["input_copy"]
    assert found["step_seconds"]["1"]["8"] == 0.12
    assert found["adaptive_length"]["speed_up"]["1"] == pytest.approx(0.1 / 0.10005)
    assert found["acceptance_per_position"][0] == 0.5


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
