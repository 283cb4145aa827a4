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

from vllm_spec_ext.bench import datasets, figures, planner
from vllm_spec_ext.bench.engine_client import EngineClient, EngineFailed, root_cause
from vllm_spec_ext.bench.methods import Method, parse_method
from vllm_spec_ext.bench.planner import Plan, Recording, StepTimes, best, ranges
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.session import sampling_of
from vllm_spec_ext.bench.settings import (
    BenchSettings,
    merge,
    parse_batch_sizes,
    parse_engine_args,
    parse_template,
)
from vllm_spec_ext.cli.bench import EXIT_FAILED, check_writable, demo_model, report_console
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers import registry

_SIZES = (0, 1, 2, 4, 8, 16, 32, 64)
_SCHEDULE = "num_speculative_tokens_per_batch_size"
_DEFAULTS = {"limit": 12, "max_tokens": 96, "batch_size": [1, 8]}


@dataclass(frozen=True)
class Recordings:
    """What one method drafted, by batch size."""

    method: Method
    full: dict[int, Recording]
    """With drafts as long as they may be, to be cut."""
    adaptive: dict[int, Recording] | None
    """As configured, where that means that the method weighs by itself what a draft is worth."""

    @property
    def branches(self) -> bool:
        """Whether it drafts trees."""
        return any(found.branches for found in self.full.values())


@dataclass(frozen=True)
class MethodPlan:
    """All caps of one method."""

    recordings: Recordings
    times: StepTimes
    plans: list[Plan]
    adaptive: Plan | None  # nothing cut but by the method itself

    @property
    def method(self) -> Method:
        """Whose plan."""
        return self.recordings.method

    def leaves_it_to_the_method(self) -> bool:
        """Whether the method's own choice is predicted to be at least as fast as any schedule."""
        if self.adaptive is None:
            return False
        chosen = [
            max(best(self.plans, size, self.times).speed_up[size], 1.0)
            for size in self.adaptive.speed_up
        ]
        own = list(self.adaptive.speed_up.values())
        return planner.typical_speed_up(own) >= planner.typical_speed_up(chosen)

    @property
    def recommended(self) -> dict[str, Any] | None:
        """A ``--speculative-config`` with the best cap at each batch size; ``None``: do without."""
        config = dict(self.method.config or {})
        if self.leaves_it_to_the_method():
            assert self.adaptive is not None
            return config if max(self.adaptive.speed_up.values()) > 1.0 else None
        schedule = ranges(self.plans, self.times)
        if not any(cap for _, _, cap in schedule):
            return None
        if self.adaptive is not None:
            config["adaptive_length"] = False
        config["num_speculative_tokens"] = max(cap for _, _, cap in schedule)
        if len(schedule) > 1:
            config[_SCHEDULE] = schedule
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
        str | None,
        typer.Option(
            "--prompts",
            help="JSON Lines file that resembles your traffic. [default: bundled]",
        ),
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Key of a line that holds the prompt. [default: prompt]")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Text around each prompt, with {text} where it goes.")
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE or NAME=FILE:LIMIT, as for `bench`; repeatable."),
    ] = None,
    raw: Annotated[
        bool | None, typer.Option(help="Send prompts without the model's chat template.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts, spread evenly over all. [default: 12]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=8, help="Most tokens of an answer. [default: 96]")
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Comma-separated numbers of requests. [default: 1,8]")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens before the timed steps. [default: as the recorded requests have]"
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of weights and activations.")] = None,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="key=value. Other arguments of `vllm.LLM`.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this SVG file.")] = None,
) -> None:
    """Find the best number of draft tokens, and where speculation stops paying.

    Records what a method drafts and what is accepted of it at each batch size, measures how long a
    step takes with so many tokens to verify, and combines both. Speed-ups are of decoding; prefill
    is the same.

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
    given: dict[str, Any] = {
        "prompts": prompts_file,
        "field": field,
        "template": parse_template(template),
        "datasets": datasets.parse(dataset) if dataset else None,
        "raw": raw,
        "limit": limit,
        "max_tokens": max_tokens,
        "batch_size": parse_batch_sizes(batch_size) if batch_size else None,
        "dtype": dtype,
        "engine_args": parse_engine_args(engine_arg) if engine_arg else None,
    }
    settings = merge(_DEFAULTS, {**given, "model": model or "demo"})
    questions = settings.questions()
    if model is None:
        settings = settings.model_copy(update={"model": demo_model()})
    out, errors = report_console(), Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="vllm-spec-plan-") as logs:
        try:
            recorded = [
                record_method(wanted, settings, questions, Path(logs), errors) for wanted in methods
            ]
            tokens = context or max(1, round(statistics.fmean(one for _, one in recorded)))
            shapes = ["wide" if one.branches else "chain" for one, _ in recorded]
            largest = [largest_draft(wanted) for wanted in methods]
            nodes = sorted({size for size in _SIZES if size < max(largest)} | set(largest))
            times = measure_times(settings, nodes, tokens, set(shapes), Path(logs), errors)
        except EngineFailed as error:
            errors.print(f"vllm-spec: {error}", markup=False, highlight=False)
            raise typer.Exit(EXIT_FAILED) from error
    found = [
        plan_method(one, times[shape]) for (one, _), shape in zip(recorded, shapes, strict=True)
    ]
    for each in found:
        show(each, out)
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(found, tokens), indent=1), encoding="utf-8")
    if plot is not None:
        curves = {one.method.name: one.plans for one in found}
        plot.write_text(figures.plan_figure(curves, found[0].times), encoding="utf-8")


def record_method(
    method: Method,
    settings: BenchSettings,
    questions: Sequence[Question],
    folder: Path,
    console: Console,
) -> tuple[Recordings, float]:
    """Answer the questions at each batch size, with every draft on record; raises EngineFailed.

    Returns:
        The recordings, and the mean number of tokens before a step.
    """
    config = {key: value for key, value in (method.config or {}).items() if key != _SCHEDULE}
    method = Method(method.name, config)  # a schedule is what is looked for
    options = registry.info(str(config["method"])).options.model_fields
    own_choice = config.get("adaptive_length", options["adaptive_length"].default)
    full = Method(method.name, {**config, "adaptive_length": False}) if own_choice else method
    name = method.name
    console.print(f"recording {name} with all its drafts ...", highlight=False)
    recordings, context = _record(full, settings, questions, folder / f"{name}.log")
    adaptive = None
    if own_choice:
        console.print(f"recording {name} as configured ...", highlight=False)
        adaptive, _ = _record(method, settings, questions, folder / f"{name}-configured.log")
    return Recordings(method, recordings, adaptive), context


def _record(
    method: Method, settings: BenchSettings, questions: Sequence[Question], log: Path
) -> tuple[dict[int, Recording], float]:
    found: dict[int, Recording] = {}
    with EngineClient(method.name, log) as client:
        client.start(settings.model, method, settings.llm_args(), sampling_of(settings))
        for size in settings.batch_size:
            # A few requests first: `adaptive_length` learns from them what a token costs at this
            # batch size.
            facts = client.prepare(questions, max(2, size), size)
            rows = client.record(range(len(questions)), size)
            found[size] = planner.read_recording(rows["steps"], rows["propose_us"])
    lengths = facts.prompt_lengths
    if not all(one.requests for one in found.values()):
        raise SpecExtError("the answers are one token long; raise --max-tokens")
    smallest = found[min(found)]
    tokens = sum(step.tokens(sys.maxsize) for step in smallest.steps) / len(smallest.requests)
    return found, statistics.fmean(lengths) + tokens / 2


def measure_times(
    settings: BenchSettings,
    nodes: Sequence[int],
    context: int,
    shapes: set[str],
    folder: Path,
    console: Console,
) -> dict[str, StepTimes]:
    """Times of steps on this machine by shape, measured in a process of their own.

    Raises:
        EngineFailed: It ended without them.
    """
    console.print("measuring steps ...", highlight=False)
    path = folder / "times.json"
    arguments = {"dtype": settings.dtype, **settings.engine_args}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "vllm_spec_ext.bench.step_probe", "--model", settings.model),
            *("--shapes", *sorted(shapes), "--sizes", *map(str, nodes)),
            *("--batch-sizes", *map(str, settings.batch_size), "--context", str(context)),
            *("--rounds", "2"),
            *("--engine-args", json.dumps(arguments), "--json", str(path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = root_cause(done.stderr + done.stdout) or done.stderr[-500:]
        raise EngineFailed(f"steps could not be measured: {reason}")
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    tables: dict[str, dict[int, dict[int, float]]] = {shape: {} for shape in shapes}
    for row in rows:
        for shape, table in tables.items():
            table.setdefault(row["batch"], {})[row["nodes"]] = row[shape] / 1e3
    return {shape: StepTimes(table) for shape, table in tables.items()}


def plan_method(recordings: Recordings, times: StepTimes) -> MethodPlan:
    """Price the recordings."""
    largest = largest_draft(recordings.method)
    adaptive = recordings.adaptive
    return MethodPlan(
        recordings,
        times,
        planner.plans(recordings.full, times, largest),
        planner.plan_for(largest, adaptive, times) if adaptive else None,
    )


def largest_draft(method: Method) -> int:
    """``num_speculative_tokens`` as given, or the method's default."""
    config = method.config or {}
    default = registry.info(str(config["method"])).num_speculative_tokens
    return int(config.get("num_speculative_tokens") or default or 1)


def show(found: MethodPlan, console: Console) -> None:
    """Print one method's table and what to use."""
    sizes = sorted(found.plans[0].speed_up)
    view = Table(title=found.method.name, title_justify="left")
    headings = ["draft tokens", "tokens/step", "verified/step"]
    headings += [f"speed-up, batch {size}" for size in sizes] + ["textbook"]
    for heading in headings:
        view.add_column(heading, justify="right")
    chosen = {size: best(found.plans, size, found.times).cap for size in sizes}

    def cells(name: str, one: Plan, marked: bool) -> list[str]:
        first = sizes[0]
        row = [name, f"{one.tokens_per_step[first]:.2f}", f"{one.nodes_per_step[first]:.1f}"]
        for size in sizes:
            mark = " <" if marked and chosen[size] == one.cap else ""
            row.append(f"{one.speed_up[size]:.2f}x{mark}")
        return row

    for one in found.plans:
        view.add_row(*cells(f"{one.cap}", one, marked=True), f"{one.textbook:.2f}x")
    if found.adaptive is not None:
        view.add_row(*cells("adaptive", found.adaptive, marked=False), "")
    console.print(view)
    for line in facts_lines(found):
        console.print(line, highlight=False)
    if found.leaves_it_to_the_method():
        console.print(
            "its own choice (adaptive_length) is as fast as any fixed number", highlight=False
        )
    else:
        for first, last, cap in ranges(found.plans, found.times):
            span = f"batch {first}" if first == last else f"batches {first} to {last}"
            advice = f"{cap} draft tokens" if cap else "do not speculate"
            console.print(f"{span}: {advice}", highlight=False)
        if len(sizes) > 1:
            measured = ", ".join(map(str, sizes))
            console.print(f"(measured at {measured}; interpolated between)", highlight=False)
    recommended = found.recommended
    if recommended is None:
        console.print("no draft pays off here: do not speculate", highlight=False)
    else:
        line = json.dumps(recommended)
        console.print(f"--speculative-config '{line}'", markup=False, highlight=False)


def facts_lines(found: MethodPlan) -> list[str]:
    """Acceptance and the drafter's time, as recorded."""
    smallest = min(found.recordings.full)
    recording = found.recordings.full[smallest]
    positions = planner.acceptance_per_position(recording.steps)
    drafter = ", ".join(
        f"{one.drafter_s * 1e6:.0f} us a step at batch {size}"
        for size, one in found.recordings.full.items()
    )
    rate = planner.acceptance_rate(recording.steps)
    cost = planner.drafting_cost(recording, found.times.plain(smallest))
    return [
        "accepted per position: " + " ".join(f"{share:.2f}" for share in positions),
        f"drafter: {drafter}; a token's acceptance {rate:.2f}, its drafting {cost:.4f} of a step",
    ]


def to_json(found: Sequence[MethodPlan], context: int) -> dict[str, Any]:
    """Everything that was measured and computed."""
    return {"context": context, "methods": {one.method.name: _plan_json(one) for one in found}}


def _plan_json(one: MethodPlan) -> Mapping[str, Any]:
    full = one.recordings.full
    smallest = full[min(full)]
    return {
        "config": one.method.config,
        "step_seconds": {str(size): dict(row) for size, row in one.times.table.items()},
        "drafter_us": {size: found.drafter_s * 1e6 for size, found in full.items()},
        "acceptance_rate": planner.acceptance_rate(smallest.steps),
        "acceptance_per_position": planner.acceptance_per_position(smallest.steps),
        "plans": [asdict(each) for each in one.plans],
        "adaptive_length": asdict(one.adaptive) if one.adaptive else None,
        "recommended": one.recommended,
    }
