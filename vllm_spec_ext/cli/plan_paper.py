# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec plan paper``: would drafts pay on a GPU that is not here?"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_spec_ext.bench import draft_levels, gpu_costs, model_shape
from vllm_spec_ext.bench.draft_levels import Cascade
from vllm_spec_ext.bench.paper_plan import (
    MOST_TOKENS,
    SHORTEST,
    Machine,
    Predicted,
    break_even,
    predict,
)
from vllm_spec_ext.bench.settings import parse_batch_sizes
from vllm_spec_ext.cli.bench import report_console
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.cli.written_files import check_writable, printed_last, write_result
from vllm_spec_ext.errors import SpecExtError

_CONTEXTS, _BATCH_SIZES = "4k,16k,32k,64k,128k", "1,4"
_NOT_RUN = "Predicted from published figures of the GPU; nothing was run on one."
_ASSUMED = (
    "Acceptance is assumed here: TriForce's rates for Llama2-7B-128K at temperature 0, and 0.42 "
    "for a lookup. Give what you measured with --draft."
)


def plan_paper(
    *,
    gpu: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(gpu_costs.GPUS)}; other figures behind it, e.g. "
            f"a100,layer_us=150 ({', '.join(gpu_costs.FIGURES)})."
        ),
    ] = "h100",
    model: Annotated[
        str,
        typer.Option(
            help=f"The target: {', '.join(model_shape.KNOWN)}, a folder with config.json, a Hub "
            "model that is on this machine, or weights=BYTES,kv=BYTES_PER_TOKEN,layers=NUMBER."
        ),
    ] = "llama2-7b",
    weight_bits: Annotated[
        float | None, typer.Option(min=1, max=32, help=r"Of the target's weights. \[default: 16]")
    ] = None,
    kv_bits: Annotated[
        float | None, typer.Option(min=1, max=32, help=r"Of the target's KV cache. \[default: 16]")
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            help="Comma-separated tokens of a request; 32k is 32768. Repeatable. "
            rf"\[default: {_CONTEXTS}]"
        ),
    ] = None,
    batch_size: Annotated[
        list[str] | None,
        typer.Option(
            help=rf"Comma-separated requests in a step; repeatable. \[default: {_BATCH_SIZES}]"
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME: LEVELS; repeatable. Levels drafting for each other, separated by ';', the "
            "one that drafts for the target first: view,budget=TOKENS,accept=RATE or "
            r"model=NAME,accept=RATE or lookup,accept=RATE. \[default: four examples]"
        ),
    ] = None,
    most_tokens: Annotated[
        int, typer.Option(min=1, max=64, help="Longest draft for the target that is tried.")
    ] = MOST_TOKENS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
) -> None:
    """Predict speed-ups on a GPU that is not here, from acceptance and published figures.

    For each draft, batch size and context: tokens a step, times, the best draft lengths, and from
    which context on it pays. Nothing is run, and no GPU and no model is needed.

    Exit status: 0 if all went well, 2 for bad input.
    """
    contexts = _contexts(",".join(context or [_CONTEXTS]))
    sizes = parse_batch_sizes(",".join(batch_size or [_BATCH_SIZES]))
    for size in sizes:
        if size < 1:
            raise SpecExtError(f"batch size {size} is not positive")
    target = model_shape.find(model).in_bits(weight_bits, kv_bits)
    machine = Machine(gpu_costs.find(gpu), target)
    cascades = [draft_levels.parse(text) for text in draft or draft_levels.EXAMPLES]
    check_writable(json_file)
    found = [
        _row(machine, cascade, size, tokens, most_tokens)
        for size in sizes
        for tokens in contexts
        for cascade in cascades
    ]
    thresholds = [
        {
            "draft": cascade.name,
            "batch": size,
            "context": break_even(machine, cascade, size, most_tokens),
            "context_eager_drafts": break_even(_eager(machine), cascade, size, most_tokens),
        }
        for cascade in cascades
        for size in sizes
    ]
    with printed_last(
        lambda: _show(machine, found, thresholds, report_console(), assumed=not draft)
    ):
        if json_file is not None:
            whole = {
                "measured": False,
                "gpu": dataclasses.asdict(machine.gpu),
                "target": dataclasses.asdict(target),
                "drafts": [dataclasses.asdict(cascade) for cascade in cascades],
                "predicted": found,
                "break_even": thresholds,
            }
            write_result(json_file, json.dumps(whole, indent=1))


def _contexts(text: str) -> list[int]:
    found = []
    for part in text.split(","):
        digits, thousands = part.strip().lower(), 1
        if digits.endswith("k"):
            digits, thousands = digits[:-1], 1024
        if not digits.isdecimal() or not int(digits):
            raise SpecExtError(f"context {part!r}: expected tokens, e.g. 4096 or 4k")
        found.append(int(digits) * thousands)
    return found


def _eager(machine: Machine) -> Machine:
    return dataclasses.replace(machine, eager_drafts=True)


def _row(
    machine: Machine, cascade: Cascade, batch_size: int, context: int, most_tokens: int
) -> dict[str, Any]:
    """What JSON and tables hold of a prediction; times are None where the memory is too small."""
    row: dict[str, Any] = {
        "draft": cascade.name,
        "batch": batch_size,
        "context": context,
        "memory_bytes": machine.memory_bytes(cascade, batch_size, context),
        "fits": machine.fits(cascade, batch_size, context),
    }
    if row["fits"]:
        best = predict(machine, cascade, batch_size, context, most_tokens)
        eager = predict(_eager(machine), cascade, batch_size, context, most_tokens)
        row |= {**_figures(best), "eager_drafts": _figures(eager)}
    return row


def _figures(found: Predicted) -> dict[str, Any]:
    return {
        "plain_s": found.plain_s,
        "drafting_s": found.step.drafting_s,
        "verify_s": found.step.verify_s,
        "tokens_per_step": found.step.tokens,
        "num_drafted": found.step.num_drafted,
        "lengths": found.lengths,
        "speed_up": found.speed_up,
    }


def _show(
    machine: Machine,
    found: Sequence[dict[str, Any]],
    thresholds: Sequence[dict[str, Any]],
    console: Console,
    *,
    assumed: bool,
) -> None:
    """Print predictions, and from where on each draft pays."""
    headings = ["draft", "batch", "context", "plain ms", "draft ms", "verify ms", "tokens/step"]
    headings += ["draft tokens", "decoding", "drafts without graphs"]
    rows = []
    for row in found:
        first = [row["draft"], str(row["batch"]), _tokens(row["context"])]
        if not row["fits"]:
            needed = f"needs {row['memory_bytes'] / 1e9:.0f} GB"
            rows.append([*first, *[""] * 5, needed, ""])
            continue
        times = [f"{row[name] * 1e3:.1f}" for name in ("plain_s", "drafting_s", "verify_s")]
        speeds = [f"{each['speed_up']:.2f}x" for each in (row, row["eager_drafts"])]
        lengths = ", ".join(map(str, row["lengths"]))
        rows.append([*first, *times, f"{row['tokens_per_step']:.2f}", lengths, *speeds])
    target = machine.target
    title = (
        f"{target.name} on {machine.gpu.name}, on paper: {target.memory_bytes / 1e9:.1f} GB of "
        f"weights, {target.kv_bytes / 1024:.0f} KiB of KV cache a token"
    )
    WholeTable(headings, rows, title).print(console)
    rows = [
        [
            row["draft"],
            str(row["batch"]),
            *(_from(row[name]) for name in ("context", "context_eager_drafts")),
        ]
        for row in thresholds
    ]
    headings = ["draft", "batch", "pays from", "drafts without graphs"]
    WholeTable(headings, rows, "tokens of context from which on it is not slower").print(console)
    console.print(_NOT_RUN, markup=False, highlight=False)
    if assumed:
        console.print(_ASSUMED, markup=False, highlight=False)


def _from(context: int | None) -> str:
    if context is None:
        return "nowhere"
    return "the start" if context <= SHORTEST else _tokens(context)


def _tokens(count: int) -> str:
    return f"{count / 1024:.0f}k" if count >= 1024 else str(count)
