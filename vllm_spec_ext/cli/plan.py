# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec plan``: how much to draft on this machine, and what it will gain."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_spec_ext.bench import figures, prompts
from vllm_spec_ext.bench.engine_client import EngineClient, EngineFailed
from vllm_spec_ext.bench.methods import Method, parse_method
from vllm_spec_ext.bench.planner import Plan, StepTimes, best, plans, ranges, read_steps
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.settings import parse_batch_sizes, parse_engine_args
from vllm_spec_ext.bench.vllm_engine import Sampling
from vllm_spec_ext.cli.bench import EXIT_FAILED, check_writable, demo_model, report_console
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers import registry

_SIZES = (0, 1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class MethodPlan:
    """All caps of one method."""

    method: Method
    drafter_us: float  # median
    plans: list[Plan]

    @property
    def recommended(self) -> dict[str, Any]:
        """A ``--speculative-config`` with the best cap at each batch size."""
        sizes = sorted(self.plans[0].speed_up)
        found = {size: best(self.plans, size) for size in sizes}
        paying = [plan.cap for size, plan in found.items() if plan.speed_up[size] > 1.0]
        config = dict(self.method.config or {})
        config["num_speculative_tokens"] = max(paying, default=1)
        if len(sizes) > 1:
            config["num_speculative_tokens_per_batch_size"] = ranges(self.plans)
        return config


def plan(
    *,
    model: Annotated[
        str | None, typer.Option(help="Target model; a small one is fetched without it.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME=JSON, as for `bench`; repeatable. Default: input_copy."),
    ] = None,
    prompts_file: Annotated[
        str, typer.Option("--prompts", help="JSON Lines file that resembles your traffic.")
    ] = prompts.BUNDLED,
    field: Annotated[str, typer.Option(help="Key of a line that holds the prompt.")] = "prompt",
    limit: Annotated[int, typer.Option(min=1, help="Prompts, spread evenly over the file.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = 96,
    batch_size: Annotated[
        str, typer.Option(help="Comma-separated numbers of requests in a step.")
    ] = "1,8",
    context: Annotated[
        int, typer.Option(min=1, help="Tokens before the measured steps, for their times.")
    ] = 256,
    dtype: Annotated[str, typer.Option(help="Type of weights and activations.")] = "auto",
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="key=value. Other arguments of `vllm.LLM`.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this SVG file.")] = None,
) -> None:
    """Find the best number of draft tokens, and where speculation stops paying.

    Measures how long a step takes with so many tokens to verify, records what a method drafts and
    what is accepted of it, and combines both. Speed-ups are of decoding; prefill is the same.

    Exit status: 0 if all went well, 1 if an engine failed, 2 for bad input.
    """
    methods = [parse_method(text) for text in method or ["input_copy"]]
    for wanted in methods:
        if not wanted.ours:
            raise SpecExtError(
                f"{wanted.name}: only this plugin's methods record their drafts; expected one of "
                + ", ".join(registry.names())
            )
    if plot is not None:
        figures.require_matplotlib()  # before minutes of measuring
    check_writable([path for path in (json_file, plot) if path is not None])
    sizes = parse_batch_sizes(batch_size)
    if min(sizes) < 1:
        raise SpecExtError(f"batch size {min(sizes)} is not positive")
    questions = prompts.load(prompts_file, field=field, template=None, limit=limit)
    arguments = {"dtype": dtype, **parse_engine_args(engine_arg or [])}
    folder, out, errors = model or demo_model(), report_console(), Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="vllm-spec-plan-") as logs:
        try:
            nodes = sorted({*_SIZES, *map(largest_draft, methods)})
            times = measure_times(folder, nodes, sizes, context, arguments, Path(logs), errors)
            found = [
                plan_method(wanted, folder, questions, max_tokens, times, arguments, Path(logs))
                for wanted in methods
            ]
        except EngineFailed as error:
            errors.print(f"vllm-spec: {error}", markup=False, highlight=False)
            raise typer.Exit(EXIT_FAILED) from error
    for one in found:
        show(one, out)
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(found, times), indent=1), encoding="utf-8")
    if plot is not None:
        curves = {one.method.name: one.plans for one in found}
        plot.write_text(figures.plan_figure(curves, times), encoding="utf-8")


def measure_times(
    model: str,
    nodes: Sequence[int],
    batch_sizes: Sequence[int],
    context: int,
    engine_args: Mapping[str, Any],
    folder: Path,
    console: Console,
) -> StepTimes:
    """Times of steps on this machine, measured in a process of their own.

    Raises:
        EngineFailed: It ended without them.
    """
    console.print("measuring steps ...", highlight=False)
    path = folder / "times.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "vllm_spec_ext.bench.step_probe", "--model", model),
            *("--shapes", "chain", "--sizes", *map(str, nodes)),
            *("--batch-sizes", *map(str, batch_sizes), "--context", str(context)),
            *("--engine-args", json.dumps(engine_args), "--json", str(path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        from vllm_spec_ext.bench.engine_client import root_cause

        reason = root_cause(done.stderr + done.stdout) or done.stderr[-500:]
        raise EngineFailed(f"steps could not be measured: {reason}")
    table: dict[int, dict[int, float]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        table.setdefault(row["batch"], {})[row["nodes"]] = row["chain"] / 1e3
    return StepTimes(table)


def plan_method(
    method: Method,
    model: str,
    questions: Sequence[Question],
    max_tokens: int,
    times: StepTimes,
    engine_args: Mapping[str, Any],
    folder: Path,
) -> MethodPlan:
    """Record a method's drafts and price them; raises EngineFailed."""
    defaults = {"max_model_len": 2048, "max_num_seqs": 1}
    with EngineClient(method.name, folder / f"{method.name}.log") as client:
        sampling = Sampling(max_tokens, 0.0, 0, False)
        client.start(model, method, {**defaults, **engine_args}, sampling)
        client.prepare(questions, 1, 1)
        traces = [
            client.trace(index, fresh=not index) for index in range(len(questions))
        ]  # what is learned from one request serves the next, as in a server
    steps = read_steps(traces)
    if not steps:
        raise SpecExtError("the answers are one token long; raise --max-tokens")
    microseconds = [us for trace in traces for us in trace["propose_us"]]
    drafter_us = statistics.median(microseconds) if microseconds else 0.0
    largest = largest_draft(method)
    return MethodPlan(method, drafter_us, plans(steps, times, drafter_us / 1e6, largest))


def largest_draft(method: Method) -> int:
    """``num_speculative_tokens`` as given, or the method's default."""
    config = method.config or {}
    default = registry.info(str(config["method"])).num_speculative_tokens
    return int(config.get("num_speculative_tokens") or default or 1)


def show(found: MethodPlan, console: Console) -> None:
    """Print one method's table and what to use."""
    sizes = sorted(found.plans[0].speed_up)
    view = Table(
        title=f"{found.method.name}: drafter {found.drafter_us:.0f} us a step",
        title_justify="left",
    )
    headings = ["draft tokens", "tokens/step", "verified/step"]
    headings += [f"speed-up, batch {size}" for size in sizes] + ["if verifying were free"]
    for heading in headings:
        view.add_column(heading, justify="right")
    chosen = {size: best(found.plans, size).cap for size in sizes}
    for one in found.plans:
        cells = [f"{one.cap}", f"{one.tokens_per_step:.2f}", f"{one.nodes_per_step:.1f}"]
        for size in sizes:
            mark = " <" if chosen[size] == one.cap else ""
            cells.append(f"{one.speed_up[size]:.2f}x{mark}")
        view.add_row(*cells, f"{one.textbook:.2f}x")
    console.print(view)
    for first, last, cap in ranges(found.plans):
        span = f"batch {first}" if first == last else f"batches {first} to {last}"
        console.print(
            f"{span}: " + (f"{cap} draft tokens" if cap else "do not speculate"), highlight=False
        )
    if any(one.speed_up[size] > 1.0 for one in found.plans for size in sizes):
        line = json.dumps(found.recommended)
        console.print(f"--speculative-config '{line}'", markup=False, highlight=False)


def to_json(found: Sequence[MethodPlan], times: StepTimes) -> dict[str, Any]:
    """Everything that was measured and computed."""
    return {
        "step_seconds": {str(size): dict(row) for size, row in times.table.items()},
        "methods": {
            one.method.name: {
                "config": one.method.config,
                "drafter_us": one.drafter_us,
                "plans": [asdict(each) for each in one.plans],
                "recommended": one.recommended,
            }
            for one in found
        },
    }
