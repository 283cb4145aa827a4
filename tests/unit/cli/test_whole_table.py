# SPDX-License-Identifier: Apache-2.0
"""Every table reaches its reader whole, on whatever terminal or pipe."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from test_bench_report import _result

from vllm_spec_ext.bench import provenance
from vllm_spec_ext.bench.saved import to_json
from vllm_spec_ext.cli import bench, doctor, simulate, top
from vllm_spec_ext.cli.environment_checks import Check
from vllm_spec_ext.cli.list_methods import list_methods
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.compat import check
from vllm_spec_ext.proposers import registry

LONG = "39.9 [38.1-41.7]"


def shown(table: WholeTable, width: int, *, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None)
    table.print(console)
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 80, 300])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_cell_is_cut(width: int, terminal: bool) -> None:
    headings = [f"column {i}" for i in range(8)]
    table = WholeTable(headings, [["name", *[f"{i}{LONG}" for i in range(7)]]], "A title")
    text = shown(table, width, terminal=terminal)
    assert "…" not in text
    joined = text.replace("\n", "") if terminal and width < 80 else text
    for cell in (*headings, *(f"{i}{LONG}" for i in range(7))):
        assert cell in joined
    assert ("| --- |" in joined) == (not terminal or width < 80)


def test_a_wide_table_has_a_line_for_each_column_where_that_fits() -> None:
    headings = ["method", *(f"figure {number}" for number in range(12))]
    rows = [[name, *(f"{name}-{number}" for number in range(12))] for name in ("plain", "ours")]
    lines = shown(WholeTable(headings, rows, "A title"), 60, terminal=True).splitlines()
    assert lines[0].strip() == "A title"
    assert [cell.strip() for cell in lines[2].split("┃")[1:-1]] == ["method", "plain", "ours"]
    assert [c.strip() for c in lines[-2].split("│")[1:-1]] == ["figure 11", "plain-11", "ours-11"]


def test_a_title_is_no_row_of_the_table_above() -> None:
    table = WholeTable(["a"], [["1"]], "A title")
    lines = (shown(table, 40, terminal=False) * 2).splitlines()
    assert lines == ["", "A title", "", "| a |", "| --- |", "| 1 |"] * 2


def test_a_pipe_gets_a_line_for_each_row() -> None:
    table = WholeTable(["a", "b"], [["x|y", "1\n2"], [Text("[bold]"), "long " * 50]])
    lines = shown(table, 40, terminal=False).splitlines()
    assert lines == [
        "| a | b |",
        "| --- | --- |",
        "| x\\|y | 1; 2 |",
        f"| [bold] | {'long ' * 50} |",
    ]


def test_words_wrap_where_each_of_them_fits() -> None:
    table = WholeTable(["a", "b"], [["name", "some more words"]], left=2, wrap=True)
    assert "some more" not in shown(table, 16, terminal=True)
    assert "| name | some more words |" in shown(table, 16, terminal=False)


def test_bench_report_and_comparison_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = _result()
    facts = provenance.collect(["vllm-spec", "bench"])
    bench.show(result, facts, bench.report_console(), by_category=True)
    row = "| ngram | 1 | 3.00 | 4.0 [4.0-4.0] | 2.00x [2.00-2.00] | 2.11x |"
    printed = capsys.readouterr().out
    assert row in printed
    assert "| ngram | 1 | 3.00 (2.00x) |" in printed
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(to_json(result, facts)))
    for files in (["a.json"], ["a.json", "b.json"]):
        with pytest.raises(SystemExit) as stop:
            main(["report", *(str(tmp_path / file) for file in files)])
        assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert row in printed
    assert "| ngram | 1 | 3.00 | 2.00x | 3.00 | 2.00x | +0.0% |" in printed


def test_list_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    list_methods()
    found = registry.info("input_copy")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "| input_copy |" in line]
    assert found.best_for in row
    assert found.cost in row


def test_doctors_places_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("COLUMNS", "40")
    hooks = check()
    doctor._show([Check("python", "ok", "3.11")], hooks)
    lines = capsys.readouterr().out.splitlines()
    for status in hooks:
        assert any(status.hook.name in line and status.hook.why in line for line in lines)


def test_simulate_and_top_in_a_narrow_terminal() -> None:
    point = simulate.make_points("input_copy", [{}])[0]
    recordings = [simulate.Recording([1, 2, 3, 4, 5] * 4, [1, 2, 3, 4, 5] * 4, "")]
    result = simulate.run_point("input_copy", point, recordings, None, "", 1)
    narrow = shown(simulate._table({"a setting": result}, "title", {}), 50, terminal=True)
    assert "accepted at depth 1 2 4 8" in narrow.replace("\n", "")
    now = top.Snapshot(0.0, {"input_copy (exact)": {"steps": 4.0, "emitted_tokens": 12.0}})
    narrow = shown(top.table(now, None), 50, terminal=True)
    lines = [[cell.strip() for cell in line.split("│")] for line in narrow.splitlines()]
    assert ["", "tokens/step", "3.00", ""] in lines  # a line for each figure
