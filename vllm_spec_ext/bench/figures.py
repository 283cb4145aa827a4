# SPDX-License-Identifier: Apache-2.0
"""Figures of a benchmark as SVG text, with its text as text."""

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_spec_ext.bench.cluster import Load
from vllm_spec_ext.bench.planner import StepTimes
from vllm_spec_ext.bench.session import BenchResult
from vllm_spec_ext.bench.statistics import Summary
from vllm_spec_ext.errors import SpecExtError


def speed_figure(result: BenchResult) -> str:
    """Speed-up over plain decoding of each method, with its range, beside tokens per step."""
    summaries = [s for s in result.summaries() if s.speed_up is not None]
    figure, (left, right) = subplots(2, height=1.2 + 0.34 * len(summaries))
    places = range(len(summaries))[::-1]
    left.barh(places, [s.tokens_per_step for s in summaries], color="#7a9cc6")
    left.set(xlabel="tokens per target step")
    spreads = [s.speed_up for s in summaries if s.speed_up is not None]
    right.barh(
        places,
        [spread.median for spread in spreads],
        xerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
        color="#86b58a",
    )
    right.set(xlabel="speed over plain decoding's")
    for axes in (left, right):
        axes.axvline(1.0, color="black", linewidth=0.8)
    left.set_yticks(places, [label(s, result) for s in summaries])
    right.set_yticks(places, [""] * len(summaries))
    return _svg(figure)


def acceptance_figure(result: BenchResult) -> str:
    """Share of drafts that were accepted up to each position; empty if nothing was drafted."""
    drafted = [s for s in result.summaries() if s.acceptance_per_position]
    if not drafted:
        return ""
    figure, (axes,) = subplots(1, height=3.6)
    _plot_acceptance(axes, {label(s, result): s.acceptance_per_position for s in drafted})
    return _svg(figure)


def drift_figure(result: BenchResult) -> str:
    """Speed against the distance from plain decoding's text; empty without a lossy method."""
    if not result.drifts:
        return ""
    drifts = {(drift.method, drift.batch_size): drift for drift in result.drifts}
    figure, (axes,) = subplots(1, height=3.8)
    for summary in result.summaries():
        drift = drifts.get((summary.method, summary.batch_size))
        lossless = result.facts[summary.method].lossless
        if summary.speed_up is None or (drift is None and not lossless):
            continue
        distance = 0.0 if drift is None else drift.edit_distance
        axes.plot(distance, summary.speed_up.median, "s" if lossless else "o", color="#44658f")
        axes.annotate(
            label(summary, result),
            (distance, summary.speed_up.median),
            textcoords="offset points",
            xytext=(6, 4),
            fontsize="small",
        )
    axes.set(
        xlabel="edit distance from plain decoding's answers (share of their tokens)",
        ylabel="speed over plain decoding's",
    )
    axes.margins(0.15)
    return _svg(figure)


def plan_figure(times: StepTimes, gains: Sequence[Mapping[str, Any]]) -> str:
    """Step time against verified tokens by batch size, and acceptance by position."""
    figure, (left, right) = subplots(2, height=4.0)
    for size, row in sorted(times.table.items()):
        nodes = sorted(row)
        left.plot(nodes, [row[n] * 1e3 for n in nodes], marker=".", label=f"batch {size}")
    left.set(xlabel="draft tokens verified for each request", ylabel="step, ms", ylim=(0, None))
    left.legend(fontsize="small")
    curves = {f"{g['method']}, batch {g['batch']}": g["acceptance_per_position"] for g in gains}
    _plot_acceptance(right, curves)
    return _svg(figure)


def cluster_figure(loads: Sequence[Load]) -> str:
    """Time a token and time to the first one against the load, by what drafts do."""
    figure, (left, right) = subplots(2, height=4.0)
    for mode in dict.fromkeys(load.mode for load in loads):
        own = [load for load in loads if load.mode == mode]
        rates = [load.rate for load in own]
        left.plot(rates, [load.token_ms for load in own], marker=".", label=f"drafts {mode}")
        right.plot(rates, [load.wait_ms for load in own], marker=".", label=f"drafts {mode}")
    left.set(xlabel="requests a second", ylabel="ms a token", ylim=(0, None))
    right.set(xlabel="requests a second", ylabel="ms to the first token", yscale="log")
    left.legend(fontsize="small")
    return _svg(figure)


def _plot_acceptance(axes: Any, curves: Mapping[str, Sequence[float]]) -> None:
    for name, shares in curves.items():
        axes.plot(range(1, len(shares) + 1), shares, marker=".", label=name)
    axes.set(xlabel="position in the draft", ylabel="accepted", ylim=(0, 1))
    axes.legend(fontsize="small")


def label(summary: Summary, result: BenchResult) -> str:
    """Name of a method, with the batch size where there are several."""
    if len(result.settings.batch_size) == 1:
        return summary.method
    return f"{summary.method}, batch {summary.batch_size}"


def require_matplotlib() -> None:
    """Raise SpecExtError with the command that installs it, where it is missing."""
    if find_spec("matplotlib") is None:
        raise SpecExtError(
            "figures need matplotlib; install it with `pip install 'vllm-spec-ext[report]'`"
        )


def check_format(file: Path) -> None:
    """Raise SpecExtError for a figure that :func:`write` could not save; as require_matplotlib."""
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if file.suffix[1:].lower() not in known:
        raise SpecExtError(f"{file}: found the ending {file.suffix!r}, expected {', '.join(known)}")


def subplots(columns: int, height: float) -> tuple[Any, Sequence[Any]]:
    """A figure and its axes, side by side; for no screen. Raises as :func:`require_matplotlib`."""
    require_matplotlib()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "vllm-spec-ext"})
    figure, axes = pyplot.subplots(1, columns, figsize=(9, height), squeeze=False)
    return figure, axes[0]


def write(figure: Any, file: Path | io.StringIO | io.BytesIO, **options: Any) -> None:
    """Save a figure, by default in the format of the file's name, and forget it."""
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(file, **options)
    pyplot.close(figure)


def _svg(figure: Any) -> str:
    """The figure as an <svg> element; no date in it, so equal figures are equal files."""
    buffer = io.StringIO()
    write(figure, buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
