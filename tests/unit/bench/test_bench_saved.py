# SPDX-License-Identifier: Apache-2.0
"""Result files: they come back as they were, and only like is compared with like."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_bench_report import _result

from vllm_spec_ext.bench import provenance, saved
from vllm_spec_ext.bench.compare import comparison
from vllm_spec_ext.bench.drift import Drift
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.session import BenchResult
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.errors import SpecExtError

FACTS = provenance.collect(["vllm-spec", "bench", "--template", "<b>{text}</b>"])


def _write(path: Path, result: BenchResult, **changes: Any) -> Path:
    data = saved.to_json(result, {**FACTS, **changes})
    path.write_text(json.dumps(data, allow_nan=False), encoding="utf-8")
    return path


def _status(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return stop.value.code


def _lossy() -> BenchResult:
    result = _result(found=(1, 2, 9))
    result.facts["ngram"] = replace(result.facts["ngram"], lossless=False)
    result.drifts = [Drift("ngram", 1, 0.0, 0.5, -2.0, -1.5)]
    return result


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    result = _lossy()
    result.failures["suffix"] = "not installed"
    result.interrupted = True
    found = saved.load(_write(tmp_path / "one.json", result))
    assert found.name == "one"
    assert found.result == result
    assert found.result.summaries() == result.summaries()
    assert found.provenance["command"] == FACTS["command"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "cannot read"),
        ("[]", "found format None, expected 3"),
        ('{"format": 2}', "found format 2, expected 3"),
        ('{"format": 3}', "is damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(text)
    with pytest.raises(SpecExtError, match=message):
        saved.load(path)
    with pytest.raises(SpecExtError, match="cannot read"):
        saved.load(tmp_path / "none.json")


def _without_plain(data: dict[str, Any]) -> None:
    data["methods"] = {name: {"method": "ngram"} for name in data["methods"]}


def _other_question(data: dict[str, Any]) -> None:
    data["runs"][0]["result"]["questions"][0]["index"] = 99


def _fewer_questions(data: dict[str, Any]) -> None:
    data["runs"][0]["result"]["questions"].pop()


def _other_method(data: dict[str, Any]) -> None:
    data["runs"][1]["method"] = "unheard of"


def _no_runs(data: dict[str, Any]) -> None:
    data["runs"] = []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_plain, "no method decodes plainly"),
        (_other_question, r"a run of 'plain' answers questions \[99\], expected \[0\]"),
        (_fewer_questions, r"a run of 'plain' answers questions \[\], expected \[0\]"),
        (_other_method, "a run is of 'unheard of', expected one of the engines: plain, ngram"),
        (_no_runs, "it holds no run, expected"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    change: Callable[[dict[str, Any]], None],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = saved.to_json(_result(), FACTS)
    change(data)
    path = tmp_path / "one.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert _status("report", str(path)) == 2
    said = capsys.readouterr().err
    assert re.search(f"one.json is damaged: {message}", said), said


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000])
def test_json_that_python_cannot_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(text)
    with pytest.raises(SpecExtError, match="cannot read"):
        saved.load(path)


def test_unlike_results_are_not_compared(tmp_path: Path) -> None:
    one = saved.load(_write(tmp_path / "one.json", _result()))
    two = saved.load(_write(tmp_path / "two.json", _result("bfloat16"), cores=64))
    saved.require_alike([one, one])
    with pytest.raises(SpecExtError) as error:
        saved.require_alike([one, two])
    assert "dtype: 'float32' and 'bfloat16'" in str(error.value)
    assert f"cores: {FACTS['cores']!r} and 64" in str(error.value)


def test_warm_up_and_torch_must_be_alike_and_repeats_need_not(tmp_path: Path) -> None:
    result, versions = _result(), FACTS["versions"]
    other = replace(result, settings=result.settings.model_copy(update={"repeats": 9}))
    one = saved.load(_write(tmp_path / "one.json", result))
    saved.require_alike([one, saved.load(_write(tmp_path / "two.json", other))])
    other = replace(result, settings=result.settings.model_copy(update={"warm_up": 9}))
    three = _write(tmp_path / "three.json", other, versions={**versions, "torch": "0.1"})
    with pytest.raises(SpecExtError) as error:
        saved.require_alike([one, saved.load(three)])
    assert f"warm_up: {result.settings.warm_up} and 9; torch: " in str(error.value)


def test_a_method_with_other_settings_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _result()
    ngram = next(method for method in result.methods if method.name == "ngram")
    changed = Method("ngram", {**(ngram.config or {}), "num_speculative_tokens": 99, "near": 3})
    others = [changed if method is ngram else method for method in result.methods]
    one = _write(tmp_path / "one.json", result)
    two = _write(tmp_path / "two.json", replace(result, methods=others))
    out = tmp_path / "page.html"
    assert _status("report", str(one), str(two), "--out", str(out)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "method 'ngram' of one and two cannot be compared; its settings differ in " in said
    assert "near: None and 3" in said
    assert "and 99" in said
    assert not out.exists()
    renamed = [replace(changed, name="wide") if m is changed else m for m in others]
    comparison([saved.load(one), saved.load(_write(two, replace(result, methods=renamed)))])


def test_page_is_whole_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = _write(tmp_path / "run.json", _lossy())
    out, folder, table = tmp_path / "a" / "page.html", tmp_path / "figures", tmp_path / "t.md"
    options = ["--out", str(out), "--figures", str(folder), "--markdown", str(table)]
    assert _status("report", str(run), *options) == 0
    page = out.read_text(encoding="utf-8")
    ElementTree.fromstring(re.sub(r"<!doctype html>|<meta [^>]*>", "", page))  # every tag closes
    assert not re.search(r"""(src|href)=["'](?!#)""", page), "something would be fetched"
    assert page.count("<svg") == 3
    assert "&lt;b&gt;{text}&lt;/b&gt;" in page, "texts are escaped"
    assert "1.50x [1.50-1.50]" in page
    assert "NOT IDENTICAL" not in page
    assert sorted(path.name for path in folder.iterdir()) == [
        "run-acceptance.svg",
        "run-drift.svg",
        "run-speed.svg",
    ]
    drift = (folder / "run-drift.svg").read_text(encoding="utf-8")
    assert ">ngram<" in drift, "text stays text"
    assert "| ngram | 1 |" in table.read_text(encoding="utf-8")


def test_runs_are_compared_by_their_ratio_to_plain_decoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = _result()
    slower.runs[0] = replace(slower.runs[0], result=_slowed(slower, 0, 2.0))
    slower.runs[1] = replace(slower.runs[1], result=_slowed(slower, 1, 4.0))
    one, two = _write(tmp_path / "one.json", _result()), _write(tmp_path / "two.json", slower)
    assert _status("report", str(one), str(two)) == 0
    printed = capsys.readouterr().out
    assert "2.00x" in printed
    assert "1.00x" in printed
    assert "-50.0%" in printed
    other = _write(tmp_path / "other.json", _result("bfloat16"))
    assert _status("report", str(one), str(other)) == 2
    assert "--separate" in capsys.readouterr().err
    assert _status("report", str(one), str(other), "--separate") == 0
    assert _status("report", str(one), str(one)) == 2


def _slowed(result: BenchResult, run: int, factor: float) -> Any:
    engine_run = result.runs[run].result
    record = engine_run.questions[0]
    turns = tuple(replace(turn, wall_s=turn.wall_s * factor) for turn in record.turns)
    return replace(engine_run, questions=(replace(record, turns=turns),))
