# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec report``: pages and figures from what ``vllm-spec bench --json`` wrote."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vllm_spec_ext.bench import figures, page
from vllm_spec_ext.bench import report as tables
from vllm_spec_ext.bench.compare import comparison
from vllm_spec_ext.bench.markdown_table import markdown_table
from vllm_spec_ext.bench.saved import SavedBench, load, require_alike, to_summary
from vllm_spec_ext.cli.bench import report_console
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.cli.written_files import write_result
from vllm_spec_ext.errors import SpecExtError

_FIGURES = {
    "speed": figures.speed_figure,
    "acceptance": figures.acceptance_figure,
    "drift": figures.drift_figure,
}


def report(
    runs: Annotated[list[Path], typer.Argument(help="Files that `bench --json` wrote.")],
    *,
    out: Annotated[Path | None, typer.Option(help="Write one self-contained HTML page.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    figure_dir: Annotated[
        Path | None, typer.Option("--figures", help="Write the figures into this folder, as SVG.")
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(help="Write one run's figures as JSON, without prompts, answers and paths."),
    ] = None,
    separate: Annotated[
        bool, typer.Option(help="Several runs that were measured unlike: a section for each.")
    ] = False,
) -> None:
    """Make a report of one or several benchmark runs; several are compared.

    Exit status: 0 if all went well, 2 for runs that cannot be read or compared.
    """
    results = [load(path) for path in runs]
    names = [saved.name for saved in results]
    if len(set(names)) < len(names):
        raise SpecExtError(f"two runs are called alike: {', '.join(names)}; rename one file")
    if summary is not None and len(results) > 1:
        raise SpecExtError(f"--summary is of one run; found {len(results)}: {', '.join(names)}")
    compare = len(results) > 1 and not separate
    if compare:
        require_alike(results)
    if out is not None:
        _write(out, page.render(results, compare=compare))
    if markdown is not None:
        parts = [tables.markdown(saved.result, saved.provenance) for saved in results]
        if compare:
            parts.insert(0, "# Comparison\n\n" + markdown_table(*comparison(results)) + "\n")
        _write(markdown, "\n".join(parts))
    if summary is not None:
        _write(summary, json.dumps(to_summary(results[0]), indent=1) + "\n")
    if figure_dir is not None:
        _write_figures(results, figure_dir)
    console = report_console()
    if compare:
        WholeTable(*comparison(results)).print(console)
    for saved in results if not compare else ():
        WholeTable(*tables.overview(saved.result), title=saved.name).print(console)


def _write_figures(results: list[SavedBench], folder: Path) -> None:
    for saved in results:
        for kind, draw in _FIGURES.items():
            svg = draw(saved.result)
            if svg:
                _write(folder / f"{saved.name}-{kind}.svg", svg)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecExtError(f"cannot write {str(path)!r}: {error}") from error
    write_result(path, text)
    print(f"wrote {path}")
