# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec doctor --method``: is a trained drafter accepted as often as it should be?"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from vllm_spec_ext.bench import drafter_session
from vllm_spec_ext.bench.drafter_check import (
    FIRST_TOKENS,
    Cause,
    Judgement,
    Measured,
    Share,
    Trials,
    judge,
)
from vllm_spec_ext.bench.drafter_parts import (
    Part,
    Recorded,
    notes,
    nothing_to_check,
    parts_of,
    recorded,
)
from vllm_spec_ext.bench.drafter_session import RefusedError
from vllm_spec_ext.bench.engine_client import EngineFailed
from vllm_spec_ext.bench.methods import Method, parse_method
from vllm_spec_ext.bench.settings import BenchSettings, merge
from vllm_spec_ext.cli.log_folder import LogFolder
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.errors import SpecExtError

NUM_PROMPTS = 8
MAX_TOKENS = 64


@dataclass
class Finding:
    """What is known of one checkpoint."""

    part: Part
    expected: Recorded
    judgement: Judgement
    measured: Measured | None = None  # None = refused before an engine ran
    trials: Trials | None = None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        measured, trials = self.measured, self.trials
        return {
            "method": self.part.method.config,
            "kind": self.part.kind,
            "model": self.part.model,
            "expected": self.expected.expected,
            "expected_from": self.expected.source,
            "recorded": dataclasses.asdict(self.expected),
            "measured": None if measured is None else _shares(measured),
            "trials": {}
            if measured is None or trials is None
            else {
                name: _plain(trials.share(name, measured, measured.firsts))
                for name in trials.drafted
            },
            "verdict": self.judgement.verdict,
            "causes": [dataclasses.asdict(cause) for cause in self.judgement.causes],
            "notes": self.notes,
        }


def check_drafters(
    method: str,
    *,
    model: str | None,
    prompts: str | None,
    limit: int | None,
    max_tokens: int | None,
    dtype: str | None,
    engine_args: dict[str, Any] | None,
    log_dir: Path | None,
    trials: bool,
    as_json: bool,
) -> None:
    """Check every trained drafter of a method; exit status 1 if one is broken.

    Args:
        method: ``NAME`` or ``NAME=JSON``, as `bench` reads it.
        model: The target.
        prompts: Prompt file; None = the bundled prompts.
        limit: Prompts to answer.
        max_tokens: Most tokens of an answer.
        dtype: As vLLM's option; None = float32 without a GPU, else vLLM's choice.
        engine_args: Further arguments of ``LLM``.
        log_dir: Keeps the engines' logs.
        trials: Draft for the same answers outside the engine, too.
        as_json: Print JSON.

    Raises:
        SpecExtError: Nothing to check, or wrong options.
    """
    asked = parse_method(method)
    parts = parts_of(asked)
    if not parts:
        raise nothing_to_check(asked)
    settings = _settings(
        asked,
        {
            "model": model,
            "prompts": prompts,
            "limit": limit or NUM_PROMPTS,
            "max_tokens": max_tokens or MAX_TOKENS,
            "dtype": dtype or _default_dtype(),
            "engine_args": engine_args,
        },
    )
    errors = Console(stderr=True, highlight=False)

    def report(text: str) -> None:
        errors.print(text, markup=False)

    logs = LogFolder("doctor", log_dir)
    try:
        with logs:
            found = [examine(part, settings, logs.path, report, trials=trials) for part in parts]
    except EngineFailed as error:
        errors.print(f"vllm-spec: {error} [logs: {logs.path}]", markup=False)
        raise typer.Exit(1) from error
    if as_json:
        ok = all(one.judgement.verdict != "broken" for one in found)
        print(json.dumps({"ok": ok, "drafters": [one.as_dict() for one in found]}, indent=2))
    else:
        show(found)
    if any(one.judgement.verdict == "broken" for one in found):
        raise typer.Exit(1)


def examine(
    part: Part,
    settings: BenchSettings,
    folder: Path,
    report: Callable[[str], None],
    *,
    trials: bool = True,
) -> Finding:
    """Check one checkpoint; raises EngineFailed.

    Args:
        part: The checkpoint.
        settings: Target, prompts and engine.
        folder: For logs and results of processes.
        report: Receives progress lines.
        trials: Draft for the same answers outside the engine, too.
    """
    expected = recorded(part)
    said = notes(expected, settings.model)
    try:
        measured = drafter_session.measure(
            part, settings, settings.questions(), folder / f"{part.kind}.log", report
        )
    except RefusedError as error:
        cause = Cause(*_refusal(str(error)))
        return Finding(part, expected, Judgement("broken", (cause,)), notes=said)
    outside = None
    if trials:
        if part.kind in drafter_session.TRIED:
            report("drafting for the same answers outside the engine ...")
            try:
                outside = drafter_session.run_trials(part, settings, measured, folder)
            except SpecExtError as error:
                said.append(f"causes were not told apart: {error}")
        else:
            said.append(
                f"causes were not told apart: drafters of the kind {part.kind} are known in the "
                "engine alone"
            )
    return Finding(part, expected, judge(expected, measured, outside), measured, outside, said)


def _refusal(text: str) -> tuple[str, str, str]:
    """Name, figure and fix of what the check of files says."""
    kinds = {
        "tokenizer": "other tokenizer",
        "vocabulary": "other vocabulary",
        "hidden size": "another target",
        "hidden states of size": "another target",
        "num_target_layers": "another target",
        "layer_ids": "wrong layers",
    }
    name = next((kind for words, kind in kinds.items() if words in text), "files refused")
    return name, text, "as the message says; nothing was started"


def _settings(method: Method, given: dict[str, Any]) -> BenchSettings:
    return merge({"methods": {method.name: method.config}}, given)


def _default_dtype() -> str:
    import torch

    return "auto" if torch.cuda.is_available() else "float32"


def show(found: list[Finding]) -> None:
    """Print a table, and what is wrong."""
    console = Console(highlight=False)
    rows: list[list[Any]] = []
    for one in found:
        rows.append(
            [
                one.part.model,
                f"{one.expected.expected:.2f}",
                "-" if one.measured is None else str(one.measured.share()),
                one.judgement.verdict,
            ]
        )
    headings = ["drafter", "expected", "measured", "verdict"]
    WholeTable(headings, rows, "first draft tokens that the target accepts").print(console)
    for one in found:
        for line in lines_of(one):
            console.print(line, soft_wrap=True, markup=False)


def lines_of(found: Finding) -> list[str]:
    """What is printed below the table."""
    lines = [f"expected from: {found.expected.source}"]
    if found.expected.at_starts is None:
        lines[0] += (
            f"; judged by {found.expected.expected:.2f}, of the weakest drafter that this package "
            "has figures of"
        )
    else:
        lines[0] += f", {found.expected.expected:.2f} where drafts start"
    measured, trials = found.measured, found.trials
    if measured is not None:
        early, late = measured.share(measured.early()), measured.share(measured.late())
        middle, short, long = measured.by_prompt_length()
        lines.append(f"by place: first {FIRST_TOKENS} tokens {early}, later ones {late}")
        lines.append(
            f"by prompt: up to {middle} tokens {measured.share(short)}, longer ones "
            f"{measured.share(long)}"
        )
    if measured is not None and trials is not None:
        for name in trials.drafted:
            lines.append(
                f"outside the engine, {name}: {trials.share(name, measured, measured.firsts)}"
            )
    lines += [f"note: {text}" for text in found.notes]
    for cause in found.judgement.causes:
        lines += [f"cause: {cause.name}: {cause.figure}", f"       fix: {cause.fix}"]
    if found.judgement.verdict != "healthy" and not found.judgement.causes:
        lines.append("cause: not found")
    return lines


def _shares(measured: Measured) -> dict[str, Any]:
    middle, short, long = measured.by_prompt_length()
    return {
        "first_token": _plain(measured.share()),
        f"first_{FIRST_TOKENS}_places": _plain(measured.share(measured.early())),
        "later_places": _plain(measured.share(measured.late())),
        "median_prompt": middle,
        "shorter_prompts": _plain(measured.share(short)),
        "longer_prompts": _plain(measured.share(long)),
        "steps_without_draft": measured.num_silent,
    }


def _plain(share: Share) -> dict[str, float]:
    return {"share": share.value, "right": share.right, "of": share.total}
