# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec online``: train a drafter that learns while it serves, look after it, stop it."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.folder import (
    Control,
    EngineState,
    FolderFacts,
    TrainerState,
    read_record,
    write_record,
)
from vllm_spec_ext.online.versions import check_version, version_numbers

online_app = typer.Typer(
    help="Drafters that learn while they serve.", no_args_is_help=True, add_completion=False
)
Folder = Annotated[Path, typer.Argument(help="The folder that the server's `online` names.")]
_ALIVE_S = 60.0


@online_app.command()
def train(
    folder: Folder,
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="Cores on average; default: the server's option.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1; default: the server's option.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="End after so many training steps.")
    ] = None,
) -> None:
    """Train beside the server until Ctrl-C; the next run goes on where this one stopped."""
    from vllm_spec_ext.online.trainer import run_trainer

    run_trainer(folder, budget=budget, device=device, max_steps=max_steps, own_process=True)


@online_app.command()
def status(folder: Folder) -> None:
    """Versions and what became of them, acceptance before and after, and the trainer."""
    facts = _facts(folder)
    engine = read_record(folder, EngineState) or EngineState()
    trainer = read_record(folder, TrainerState)
    now = time.time()
    console = Console()
    numbers = ", ".join(map(str, version_numbers(folder)))
    rows = [
        ["drafter", f"{facts.method} of {facts.target}"],
        ["serving", f"version {engine.serving}, for {_span(engine.since, now)}"],
        ["on trial", "-" if engine.trying is None else f"version {engine.trying}"],
        ["frozen", "yes" if engine.frozen else "no"],
        ["versions", numbers],
        ["accepted a step", f"{_number(engine.acceptance)} now, version 0 gives "
            f"{_number(engine.acceptance_at_start)} at the same time"],
        ["positions", f"{engine.recorded} recorded since the start, {engine.lost} lost"],
    ]  # fmt: skip
    if trainer is None:
        rows.append(["trainer", f"none so far; vllm-spec online train {folder}"])
    else:
        shown = trainer.waits_for or "training"
        if now - trainer.alive_at >= _ALIVE_S:
            silence = _span(trainer.alive_at, now)
            shown = f"not running for {silence}"
            if _runs_here(trainer):
                shown = f"process {trainer.pid} runs, not heard of for {silence}: are cores free?"
        rows += [
            ["trainer", f"{shown}; {trainer.steps} steps, {trainer.core_share:.2f} cores"],
            ["held-out", f"divergence {_number(trainer.held_out)}, "
                f"acceptance to expect {_number(trainer.overlap)}"],
        ]  # fmt: skip
    WholeTable(["", ""], rows, f"Online drafter in {folder}", left=2, wrap=True).print(console)
    if engine.verdicts:
        judged = [
            [str(v.version), "kept" if v.kept else "refused", v.reason, f"{_span(v.when, now)} ago"]
            for v in engine.verdicts
        ]
        headings = ["version", "verdict", "why", "when"]
        WholeTable(headings, judged, "Verdicts", left=4, wrap=True).print(console)


@online_app.command()
def freeze(
    folder: Folder,
    off: Annotated[bool, typer.Option("--off", help="Go on learning.")] = False,
) -> None:
    """Serve what is served now; try nothing new, and train nothing, until `--off`."""
    _facts(folder)
    _order(folder, frozen=not off)
    print("learning goes on" if off else "frozen; `--off` lets it learn again")


@online_app.command()
def rollback(
    folder: Folder,
    to: Annotated[
        int | None,
        typer.Option(min=0, help="Version to serve; default: the one kept before, or 0."),
    ] = None,
) -> None:
    """Serve an earlier version now; newer ones are tried when they come."""
    facts = _facts(folder)
    engine = read_record(folder, EngineState) or EngineState()
    if to is None:
        kept = {v.version for v in engine.verdicts if v.kept} | set(engine.served)
        present = set(version_numbers(folder))
        earlier = sorted((number for number in kept if number < engine.serving), reverse=True)
        to = next((number for number in earlier if number in present), 0)
        for gone in earlier[: earlier.index(to) if to in earlier else None]:
            print(f"version {gone}, which was kept later, is no longer there")
    check_version(folder, to, facts.drafter)
    _order(folder, serve=to)
    print(f"version {to} will be served between two of the next steps")


def _order(folder: Path, **changes: int | bool) -> None:
    """Write an order for the engine; a rollback that it has not obeyed yet stays one."""
    control = read_record(folder, Control) or Control()
    obeyed = (read_record(folder, EngineState) or EngineState()).obeyed
    if control.serial <= obeyed:
        control = control.model_copy(update={"serial": obeyed, "serve": None})
    changes["serial"] = control.serial + 1
    write_record(folder, control.model_copy(update=changes))


def _facts(folder: Path) -> FolderFacts:
    facts = read_record(folder, FolderFacts) if folder.is_dir() else None
    if facts is None:
        raise SpecExtError(
            f"no online.json in {folder}; expected the folder of a server that runs with "
            '{"online": {"folder": ...}}'
        )
    return facts


def _runs_here(trainer: TrainerState) -> bool:
    """Whether its process is there, on this machine; of one on another, nothing is known."""
    import psutil

    try:
        return psutil.Process(trainer.pid).create_time() <= trainer.alive_at
    except psutil.Error:
        return False


def _span(since: float, now: float) -> str:
    """From then until now, in the largest unit of which it is two or more."""
    if not since:
        return "-"
    seconds = max(0.0, now - since)
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
