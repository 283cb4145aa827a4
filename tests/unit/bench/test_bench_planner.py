# SPDX-License-Identifier: Apache-2.0
"""Expected gains, against steps and costs whose right answer is plain to see."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_spec_ext.bench.planner import (
    RecordedStep,
    Recording,
    StepTimes,
    expected_speed_up,
    read_recording,
)
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.cli.simulate import speed_up
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.replay import ReplayResult

FREE = StepTimes({1: {0: 1.0, 64: 1.0}})
DEAR = StepTimes({1: {0: 1.0, 8: 1.8}, 8: {0: 1.0, 8: 9.0}})  # 0.1 and 1.0 a node


def steps(*drafts: tuple[int, int], first: int = 0) -> tuple[RecordedStep, ...]:
    """One request's steps, each the only one of its engine step."""
    return tuple(RecordedStep(first + i, *draft) for i, draft in enumerate(drafts))


def row(request: str, step: int, parents: list[int], **more: Any) -> dict[str, Any]:
    """As the worker's StepLog writes it."""
    tokens = list(range(len(parents)))
    found = {"request_id": request, "step": step, "tokens": tokens, "parents": parents}
    return {"accepted": [], **found, **more}


def test_free_verification_gives_the_tokens_per_step() -> None:
    chains = Recording((steps((8, 8), (8, 0), (0, 0)),), 0.0)
    assert chains.tokens_per_step == pytest.approx(11 / 3)
    assert chains.nodes_per_step == pytest.approx(16 / 3)
    assert expected_speed_up(chains, 1, FREE) == pytest.approx(11 / 3)
    assert expected_speed_up(chains, 1, DEAR) == pytest.approx(11 / (1.8 + 1.8 + 1))
    assert expected_speed_up(chains, 8, DEAR) == pytest.approx(11 / (9 + 9 + 1))


def test_the_first_step_of_each_turn_is_its_prefill() -> None:
    found = read_recording(
        [
            row("0-0", 1, []),
            row("0-0", 2, [-1, 0], accepted=[0]),
            row("0-1", 3, []),
            row("1-0", 3, []),
            row("0-1", 4, [-1], accepted=[0]),
        ],
        [7.0, 100.0, 7.0, 300.0],
    )
    assert found.requests == ((RecordedStep(2, 2, 1),), (RecordedStep(4, 1, 1),))
    assert found.drafter_s == pytest.approx(200e-6)
    assert not found.branches
    tree = read_recording([row("a", 0, []), row("a", 1, [-1, 0, -1], accepted=[2])], [])
    assert tree.branches


def test_steps_of_a_batch_that_is_not_full_are_left_out() -> None:
    rows = [row(name, 1, []) for name in "ab"]
    rows += [row("a", 2, [-1], accepted=[0]), row("b", 2, [])]
    rows += [row("a", 3, [-1, 0, 1, 2])]  # `adaptive_length` drafts more as soon as it is alone
    found = read_recording(rows, [1.0, 20.0, 1.0])
    assert found.requests == ((RecordedStep(2, 1, 1),), (RecordedStep(2, 0, 0),))
    assert found.drafter_s == pytest.approx(20e-6)


def test_the_drafters_time_is_that_of_the_whole_batch() -> None:
    one = Recording((steps((0, 0)),), 0.25)
    assert [expected_speed_up(one, size, DEAR) for size in (1, 8)] == pytest.approx([0.8, 0.8])


def test_a_step_takes_as_long_as_its_requests_nodes_together() -> None:
    curved = StepTimes({2: {0: 1.0, 4: 1.0, 8: 2.0}})
    batch = Recording((steps((8, 8)), steps((0, 0))), 0.0)  # one engine step of two
    assert expected_speed_up(batch, 2, curved) == pytest.approx(1 / ((1 / 9 + 1) / 2))


def test_requests_count_alike_however_long() -> None:
    free_text = steps(*[(0, 0)] * 100)
    copied = steps(*[(4, 4)] * 4, first=100)
    found = Recording((free_text, copied), 0.0)
    assert expected_speed_up(found, 1, FREE) == pytest.approx(1 / ((1 + 0.2) / 2))


def test_acceptance_per_position() -> None:
    found = Recording((steps((4, 2), (4, 1), (0, 0)),), 0.0)
    assert found.acceptance_per_position == [1.0, 0.5]


def test_simulate_with_measured_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replayed = ReplayResult(num_steps=2, num_tokens=6, num_drafted=8, propose_us=[1e5, 1e5])
    assert speed_up(replayed, 1, DEAR, FREE) == pytest.approx(3 / (1.4 + 0.1))
    assert speed_up(replayed, 8, DEAR, DEAR) == pytest.approx(3 / (5.0 + 0.8))
    branching = replace(replayed, num_branching=1)
    assert speed_up(branching, 1, FREE, DEAR) == pytest.approx(3 / (1.4 + 0.1))
    again = [1, 2, 3, 4, 5] * 3
    Path("r.jsonl").write_text(json.dumps({"prompt_token_ids": again, "output_token_ids": again}))
    Path("plan.json").write_text(json.dumps({"step_seconds": {"1": {"0": 1.0, "64": 1.0}}}))
    words = ["simulate", "r.jsonl", "--method", "input_copy", "--steps", "plan.json"]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--json", "out.json"])
    assert stop.value.code == 0
    (row,) = json.loads(Path("out.json").read_text())
    assert row["speed_up"] == pytest.approx(row["tokens_per_step"], rel=0.1)  # verification free
    assert f"| {row['speed_up']:.2f}x |" in capsys.readouterr().out
    rows = {"1": {"0": 1.0, "1": 1.0, "2": 1.5}}
    Path("plan.json").write_text(json.dumps({"step_seconds": rows}))
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    assert "more draft tokens a step than were measured (2)" in capsys.readouterr().err
    for other in ("[]", "{", '{"step_seconds": {"1": 2}}', '{"step_seconds": {"x": {}}}'):
        Path("other.json").write_text(other)
        with pytest.raises(SpecExtError, match="no step times"):
            StepTimes.read(Path("other.json"))
    with pytest.raises(SystemExit) as stop:
        main([*words, "--batch-size", "8"])
    assert stop.value.code == 2
    assert "batch sizes 1, not of 8" in capsys.readouterr().err


def test_more_nodes_than_were_measured_cost_what_the_last_ones_did() -> None:
    times = StepTimes({1: {0: 1.0, 8: 1.0, 16: 1.4}, 2: {0: 1.0, 8: 0.9}, 4: {0: 1.0}})
    assert times.predict(1, 24) == pytest.approx(1.8)
    assert times.predict(2, 24) == pytest.approx(0.9)  # noise makes nothing free
    assert times.predict(4, 24) == pytest.approx(1.0)


def test_steps_with_branches_are_read_where_there_are_some(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"step_seconds": {"1": {"0": 1.0}}}))
    assert StepTimes.read(file, branches=True).table == {1: {0: 1.0}}
    more = {"step_seconds_with_branches": {"1": {"0": 2.0}}}
    file.write_text(json.dumps({"step_seconds": {"1": {"0": 1.0}}, **more}))
    assert StepTimes.read(file, branches=True).table == {1: {0: 2.0}}
    assert StepTimes.read(file).table == {1: {0: 1.0}}
