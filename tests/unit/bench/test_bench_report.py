# SPDX-License-Identifier: Apache-2.0
"""What a reader and a script get to see, from made-up runs."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_spec_ext.bench import provenance, report, saved
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.records import (
    EngineCounters,
    EngineFacts,
    EngineRun,
    QuestionRecord,
    Run,
    TurnRecord,
)
from vllm_spec_ext.bench.session import BenchResult, rotated
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.cli import bench as bench_command
from vllm_spec_ext.cli import demo
from vllm_spec_ext.cli.main import main


def _run(tokens: tuple[int, ...], steps: tuple[int, ...], wall_s: float) -> EngineRun:
    gaps = (0.1, *[(wall_s - 0.1) / max(len(steps) - 1, 1)] * (len(steps) - 1))
    turn = TurnRecord(5, tokens, steps, 0.1, wall_s, gaps)
    counters = EngineCounters(1, 4, 2, (1, 1, 0, 0)) if max(steps) > 1 else EngineCounters()
    return EngineRun((QuestionRecord(0, "copy", (turn,)),), wall_s, counters, None, 2**30)


def _result(dtype: str = "float32", *, found: tuple[int, ...] = (1, 2, 3, 4)) -> BenchResult:
    result = BenchResult(
        BenchSettings(model="m", methods=["plain", "ngram"]),
        [Method("plain", None), Method("ngram", {"method": "ngram"})],
        [Question(17, "copy", ({"role": "user", "content": "x"},))],
    )
    for name in ("plain", "ngram"):
        result.facts[name] = EngineFacts(dtype, True, "cpu", 1.0)
    result.runs = [
        Run("plain", 1, 0, _run((1, 2, 3, 4), (1, 1, 1, 1), 2.0)),
        Run("ngram", 1, 0, _run(found, (1, len(found) - 1) if len(found) > 1 else (1,), 1.0)),
    ]
    return result


def test_overview_row() -> None:
    headings, rows = report.overview(_result())
    assert headings == report.HEADINGS
    assert rows[1] == [
        "ngram",
        "1",
        "3.00",
        "4.0 [4.0-4.0]",
        "2.00x [2.00-2.00]",
        "2.11x",
        "100",
        "300.0",
        "900/900",
        "-",
        "1024",
        "yes",
        "1/1",
    ]


def test_a_difference_in_float32_is_a_broken_promise_with_its_place() -> None:
    result = _result(found=(1, 2, 9))
    (broken,) = result.broken_promises()
    assert broken.method == "ngram"
    (line,) = report.verdict_lines(result)
    assert line.startswith("NOT IDENTICAL ngram (batch 1): 1 of 1 answers differ")
    assert "line 17" in line
    assert "3 tokens, expected 4, first difference at token 2" in line


def test_a_difference_in_bfloat16_is_a_note() -> None:
    result = _result("bfloat16", found=(1, 2, 9))
    assert result.broken_promises() == []
    (line,) = report.verdict_lines(result)
    assert line.startswith("note: ngram")
    assert "bfloat16 rounds by batch shape" in line


def test_a_method_that_changes_the_text_on_purpose_breaks_no_promise() -> None:
    result = _result(found=(1, 2, 9))
    result.facts["ngram"] = EngineFacts("float32", False, "cpu", 1.0)
    assert result.broken_promises() == []
    assert "not lossless" in report.verdict_lines(result)[0]


def test_acceptance_line() -> None:
    (line,) = report.acceptance_lines(_result().summaries())
    assert line == (
        "ngram (batch 1): 1 drafts of 4.0 tokens, 0.50 of them accepted; "
        "per position 1.00 1.00 0.00 0.00"
    )


def test_engines_with_less_room_are_named() -> None:
    result = _result()
    assert report.kv_cache_lines(result) == []
    for name, tokens in (("plain", 6400), ("ngram", 6400)):
        result.facts[name] = EngineFacts("float32", True, "cpu", 1.0, kv_tokens=tokens)
    assert report.kv_cache_lines(result) == []
    result.facts["ngram"] = EngineFacts("float32", True, "cpu", 1.0, kv_tokens=2400)
    run = result.runs[1].result
    counters = run.counters + EngineCounters(num_preemptions=3)
    result.runs[1] = Run("ngram", 1, 0, replace(run, counters=counters))
    lines = report.kv_cache_lines(result)
    assert lines == [
        "KV cache, tokens of requests: plain 6,400, ngram 2,400",
        "requests preempted for want of KV cache: ngram 3 (batch 1)",
    ]
    text = report.markdown(result, provenance.collect(["x"]))
    assert all(f"- {line}\n" in text for line in lines)


def test_batches_that_are_never_full_are_named() -> None:
    result = _result()
    result.settings = BenchSettings(model="m", methods=["plain", "ngram"], batch_size=[1, 8])
    (line,) = report.verdict_lines(result)
    assert line.startswith("note: 1 prompts never fill a batch of 8")


def test_json_holds_everything_and_no_nan() -> None:
    result = _result(found=(1,))  # no decode step: tokens per step is undefined
    result.failures["suffix"] = "no arctic_inference"
    facts = provenance.collect(["vllm-spec", "bench", "--model", "a b"])
    text = json.dumps(saved.to_json(result, facts), allow_nan=False)
    data = json.loads(text)
    assert data["summaries"][1]["tokens_per_step"] is None
    assert data["runs"][0]["result"]["questions"][0]["turns"][0]["token_ids"] == [1, 2, 3, 4]
    assert data["failures"] == {"suffix": "no arctic_inference"}
    assert data["identity_required"] == {"plain": False, "ngram": True}
    assert data["provenance"]["command"] == "vllm-spec bench --model 'a b'"
    assert len(data["provenance"]["prompts_sha256"]) == 64
    assert {"cpu", "cores", "date", "versions", "git_sha"} <= data["provenance"].keys()


def test_markdown_has_the_tables_and_escapes_bars() -> None:
    result = _result()
    result.methods[1] = Method("a|b", {"method": "ngram"})
    result.runs[1] = Run("a|b", 1, 0, result.runs[1].result)
    text = report.markdown(result, provenance.collect(["x"]))
    assert "| method | batch | tokens/step |" in text
    assert "| a\\|b | 1 | 3.00 |" in text


def test_the_slowest_stretch_of_each_category_is_a_table_of_its_own() -> None:
    result = _result()
    headings, rows = report.slowest_by_category(result)
    assert headings == ["slowest 200 steps", "batch", "copy"]
    # Its one decoding step, beside the three of plain decoding for the same tokens.
    assert rows == [["ngram", "1", "2.11x"]]
    facts = provenance.collect(["x"])
    assert "| slowest 200 steps | batch | copy |" in report.markdown(result, facts)
    result.runs = result.runs[:1]
    assert report.slowest_by_category(result)[1] == []
    assert "slowest" not in report.markdown(result, facts)


def test_orders_rotate() -> None:
    assert [rotated("ABC", repeat) for repeat in range(4)] == [
        ["A", "B", "C"],
        ["B", "C", "A"],
        ["C", "A", "B"],
        ["A", "B", "C"],
    ]
    assert rotated([], 1) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_the_demo_marks_a_step_by_colours_only_on_a_terminal(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, color_system="standard" if terminal else None
    )
    demo.print_legend(console)
    for pieces in (["The", " cat", " sat"], ["."]):
        console.print(demo.marked(pieces, plain=False, by=demo.shows(console)), end="")
    if terminal:
        assert "\x1b[32mThe cat\x1b[0m\x1b[33m sat\x1b[0m" in file.getvalue()
        assert "legend" in file.getvalue()
    else:
        assert file.getvalue() == "\nlegend: [accepted draft tokens]\n[The cat] sat."


def test_the_demo_takes_turns_through_the_categories() -> None:
    questions = [Question(i, name, ()) for i, name in enumerate(["copy", "copy", "editing", "x"])]
    assert [q.line for q in demo.pick(questions, 9)] == [2, 0, 1]


def test_answers_that_hold_what_was_asked_for_are_counted() -> None:
    result = _result()
    assert report.right_answer_lines(result.summaries()) == []
    for place, right in enumerate((True, False)):
        run = result.runs[place]
        (record,) = run.result.questions
        judged = replace(run.result, questions=(replace(record, right=right),))
        result.runs[place] = replace(run, result=judged)
    lines = report.right_answer_lines(result.summaries())
    assert lines == [
        "plain (batch 1): 1 of 1 answers hold what was asked for",
        "ngram (batch 1): 0 of 1 answers hold what was asked for",
    ]
    facts = provenance.collect(["vllm-spec", "bench"])
    assert f"- {lines[1]}" in report.markdown(result, facts)
    text = json.dumps(saved.to_json(result, facts))
    assert '"right": true' in text


def test_files_are_written_before_anything_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the table may have seen enough of it: `bench | head`."""

    def gone(*_: Any, **__: Any) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(bench_command, "run", lambda *_: _result())
    monkeypatch.setattr(bench_command, "show", gone)
    found, table = tmp_path / "r.json", tmp_path / "r.md"
    with pytest.raises(SystemExit):
        main(["bench", "--model", "m", "--json", str(found), "--markdown", str(table)])
    assert json.loads(found.read_text())["settings"]["model"] == "m"
    assert "tokens/step" in table.read_text()
