# SPDX-License-Identifier: Apache-2.0
"""Results as one self-contained HTML page."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from vllm_spec_ext.bench import figures, report
from vllm_spec_ext.bench.compare import comparison
from vllm_spec_ext.bench.saved import SavedBench, conditions
from vllm_spec_ext.errors import SpecExtError


def render(results: Sequence[SavedBench], *, compare: bool) -> str:
    """The page: a section for each result, and a comparison first where one is wanted.

    Raises:
        SpecExtError: jinja2 or matplotlib is not installed.
    """
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise SpecExtError(
            "reports need jinja2; install it with `pip install 'vllm-spec-ext[report]'`"
        ) from error
    source = (files("vllm_spec_ext.bench") / "page.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        source
    )
    return template.render(
        title=", ".join(saved.name for saved in results),
        comparison=comparison(results) if compare else None,
        sections=[_section(saved) for saved in results],
    )


def _section(saved: SavedBench) -> dict[str, Any]:
    result = saved.result
    tables = [("Methods", report.overview(result))]
    if len({question.category for question in result.questions}) > 1:
        tables.append(("By category: tokens per step (speed-up)", report.by_category(result)))
        slowest = report.slowest_by_category(result)
        tables += [("By category: the slowest stretch", slowest)] if slowest[1] else []
    if result.drifts:
        tables.append(("What the lossy methods did to the text", report.drift_table(result)))
    drawn = [
        ("Speed", figures.speed_figure(result)),
        ("Acceptance by position", figures.acceptance_figure(result)),
        ("Speed against drift", figures.drift_figure(result)),
    ]
    return {
        "name": saved.name,
        "caption": report.caption(result, saved.provenance),
        "tables": tables,
        "figures": [(title, svg) for title, svg in drawn if svg],
        "notes": [
            *report.acceptance_lines(result.summaries()),
            *report.slowest_lines(result),
            *report.kv_cache_lines(result),
            *report.right_answer_lines(result.summaries()),
            *report.verdict_lines(result),
        ],
        "conditions": conditions(saved),
        "provenance": saved.provenance,
        "methods": {method.name: method.config for method in result.methods},
    }
