# SPDX-License-Identifier: Apache-2.0
"""What explain-step makes of drafts and recordings, and what it refuses; no engine."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from vllm_spec_ext.cli import explain_step as module
from vllm_spec_ext.cli.explain_step import (
    DraftStep,
    choose,
    explain_step,
    from_engine,
    rich_tree,
    show,
    verified_by,
)
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.cli.step_calibration import (
    Calibration,
    StrengthCalibration,
    calibration,
    calibration_by_strength,
    calibration_table,
    strength_table,
)
from vllm_spec_ext.engine.watching.step_log import StepLog
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.base import Draft, chain

TREE = Draft(np.array([5, 6, 7, 8], np.int32), np.array([-1, 0, -1, 2], np.int32))


def test_judging_a_tree_by_a_recording() -> None:
    step = verified_by(TREE, [7, 8, 9, 1], [3])
    assert step.accepted == [2, 3]
    assert step.new_tokens == [7, 8, 9]
    assert (step.num_segments, step.off_first_path) == (2, 2)
    assert verified_by(TREE, [5, 9], [3]).accepted == [0]
    assert verified_by(TREE, [1], [3]).accepted == []


def test_a_chain_has_one_segment_and_nothing_off_the_first_path() -> None:
    step = verified_by(chain([5, 6, 7]), [5, 6, 1], [3])
    assert (step.accepted, step.num_segments, step.off_first_path) == ([0, 1], 1, 0)


def test_choosing_a_step() -> None:
    first, branch = verified_by(TREE, [5, 6, 1], [3]), verified_by(TREE, [7, 1], [3])
    nothing = DraftStep([], [], [], [], [4], [3])
    assert choose([nothing, first, branch], None) == 2
    assert choose([nothing, first], None) == 1
    assert choose([first, branch], 1) == 0
    for number in (0, 3):
        with pytest.raises(SpecExtError, match="expected 1 to 2"):
            choose([first, branch], number)
    with pytest.raises(SpecExtError, match="no step"):
        choose([nothing], None)


def test_the_log_pairs_drafts_with_their_outcomes() -> None:
    log = StepLog()
    log.verified("a", [], [], [5])  # the prefill
    draft = Draft(TREE.tokens, TREE.parents, path_probs=np.array([0.5, 0.25, 0.5, 0.5], np.float32))
    log.drafted("a", [5, 6, 7], [-1, 0, -1], draft)
    log.drafted("b", [1], [-1], chain([1]))
    log.verified("a", [5, 6], [0], [5, 9])  # the scheduler cut the draft short
    log.forget(["b"])
    log.verified("b", [-1], [], [3])  # placeholders of a resumed request
    steps = from_engine(
        {"prompt": [1, 2], "steps": [s for s in log.steps if s["request_id"] == "a"]}
    )
    assert steps == [DraftStep([5, 6], [-1, 0], [0.5, 0.25], [0], [5, 9], [1, 2, 5])]
    assert log.steps[-1]["tokens"] == []


def test_the_terminal_tree_names_every_node() -> None:
    step = verified_by(TREE, [7, 1], [3])
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(rich_tree(step, ["a", "b", "c", "d"], "root", " x"))
    lines = captured.get().splitlines()
    assert lines[0] == "root"
    assert any("c" in line and "accepted" in line for line in lines)
    assert any("␣x" in line and "target" in line for line in lines)
    assert len(lines) == 6


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_long_draft_is_shown_whole(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes stand below each other, a branch to their right."""
    monkeypatch.setenv("COLUMNS", columns)
    tokens = list(range(32))
    parents = [*range(-1, 30), 14]  # the last one is a second child in the middle
    draft = Draft(np.array(tokens, np.int32), np.array(parents, np.int32))
    step = verified_by(draft, [*tokens[:31], 99], [40])
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(f"word-{i}." for i in ids))
    show([step], 0, "auto", tokenizer, svg=None, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    for token in [*tokens, 99]:
        assert len([line for line in lines if f"word-{token}." in line]) == 1, token
    assert max(line.index("word") for line in lines if "word-" in line and "after" not in line) < 12


def test_a_recording_that_ends_with_a_draft_has_no_token_behind_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = verified_by(chain([5, 6, 7]), [5, 6, 7], [3])
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(chr(92 + i) for i in ids))
    show([step], 0, "input_copy", tokenizer, svg=None, as_json=False)
    assert "the target's own" not in capsys.readouterr().out
    show([step], 0, "input_copy", tokenizer, svg=None, as_json=True)
    assert json.loads(capsys.readouterr().out)["bonus_text"] is None


def test_one_turn_of_a_conversation_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": ["first", "second"]}))
    assert module._question(None, str(file), 0).follow_ups == ()


def test_nodes_of_merged_trees_name_their_models() -> None:
    sources = (("big", "small"), ("big",), ("small",), ("small",))
    draft = Draft(TREE.tokens, TREE.parents, sources=sources)
    log = StepLog()
    log.drafted("a", [5, 6, 7], [-1, 0, -1], draft)
    log.verified("a", [5, 6, 7], [2], [7, 1])
    log.verified("a", [], [], [2])
    logged = from_engine({"prompt": [3], "steps": list(log.steps)})
    assert [step.sources for step in logged] == [[["big", "small"], ["big"], ["small"]], []]
    step = verified_by(draft, [7, 1], [3])
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(rich_tree(step, ["a", "b", "c", "d"], "root", "x"))
    lines = captured.get().splitlines()
    assert [line for line in lines if "big + small" in line and "a" in line]
    assert sum("small" in line for line in lines) == 3


def test_what_was_expected_of_each_source_and_found() -> None:
    sources = (("copy", "recycled"), ("copy",), ("recycled",), ("recycled",))
    probs = np.array([0.5, 0.25, 0.25, 0.125], np.float32)
    draft = Draft(TREE.tokens, TREE.parents, path_probs=probs, sources=sources)
    first, second = verified_by(draft, [7, 8, 1], [3]), verified_by(draft, [5, 1], [3])
    assert calibration([first, second]) == {
        "recycled": Calibration(6, 1.75, 3),
        "copy": Calibration(4, 1.5, 1),
    }
    alone = verified_by(Draft(TREE.tokens, TREE.parents, path_probs=probs), [7, 1], [3])
    nothing_said = verified_by(TREE, [7, 1], [3])
    assert calibration([alone, nothing_said]) == {"": Calibration(4, 1.125, 1)}
    shown = calibration_table("input_copy", calibration([alone]), {})
    assert shown.rows == [["input_copy", "4", "1.1", "1", "-", "-"]]
    assert calibration([nothing_said]) == {}


def test_what_was_expected_of_each_strength_and_found() -> None:
    sources = (("copy", "recycled"), ("copy",), ("recycled",), ("recycled",))
    strengths = (("likely", "likely"), ("unlikely",), ("likely",), ("unlikely",))
    probs = np.array([0.5, 0.25, 0.25, 0.125], np.float32)
    draft = Draft(TREE.tokens, TREE.parents, path_probs=probs, sources=sources, strengths=strengths)
    log = StepLog()
    for new, accepted in (([7, 8, 1], [2, 3]), ([5, 1], [0])):
        log.drafted("a", TREE.tokens.tolist(), [-1, 0, -1, 2], draft)
        log.verified("a", TREE.tokens.tolist(), accepted, new)
    logged = from_engine({"prompt": [3], "steps": list(log.steps)})
    replayed = [verified_by(draft, [7, 8, 1], [3]), verified_by(draft, [5, 1], [3])]
    found = calibration_by_strength(logged)
    assert found == calibration_by_strength(replayed)
    assert found == [
        StrengthCalibration(4, 1.5, 2, "recycled", "likely", 2),
        StrengthCalibration(2, 0.25, 1, "recycled", "unlikely", 2),
        StrengthCalibration(2, 1.0, 1, "copy", "likely", 2),
        StrengthCalibration(2, 0.5, 0, "copy", "unlikely", 2),
    ]
    assert strength_table(found).rows[0] == ["recycled", "likely", "2", "4", "38%", "50%"]
    without = Draft(TREE.tokens, TREE.parents, path_probs=probs, sources=sources)
    assert calibration_by_strength([verified_by(without, [7, 1], [3])]) == []


def test_contradicting_options_are_refused() -> None:
    with pytest.raises(SpecExtError, match="not both"):
        explain_step(step=1, best=True)
    with pytest.raises(SpecExtError, match="one of"):
        explain_step(prompt="a", prompt_file="b")
    with pytest.raises(SpecExtError, match="one value"):
        explain_step(settings=["max_depth=1,2"])


def test_a_prompt_with_half_a_character_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal that writes Latin-1; no model is fetched or started for it."""
    monkeypatch.setattr(module, "demo_model", lambda: 1 / 0)
    given = os.fsdecode("caf\u00e9".encode("latin-1"))
    with pytest.raises(SystemExit) as stop:
        main(["explain-step", "--prompt", given])
    assert stop.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert r"--prompt: the text holds half a character, '\udce9' at 3; remove it, or give" in said
    assert "Traceback" not in said
