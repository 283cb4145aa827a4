# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec plan``: what a step costs on this machine, and what methods gain under it."""

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_spec_ext.bench import datasets, figures
from vllm_spec_ext.bench.draft_plan import PAIRS, Pair, parse_tree
from vllm_spec_ext.bench.engine_client import EngineClient, EngineFailed
from vllm_spec_ext.bench.methods import Method, parse_method
from vllm_spec_ext.bench.own_process import measure_apart
from vllm_spec_ext.bench.planner import Recording, StepTimes, expected_speed_up, read_recording
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.session import log_name, sampling_of
from vllm_spec_ext.bench.settings import (
    BenchSettings,
    merge,
    parse_batch_sizes,
    parse_engine_args,
    parse_template,
)
from vllm_spec_ext.bench.step_probe import Shape
from vllm_spec_ext.cli.bench import (
    EXIT_FAILED,
    DatasetOption,
    DtypeOption,
    EngineArgOption,
    FieldOption,
    ModelOption,
    PromptsOption,
    RawOption,
    TemplateOption,
    demo_model,
    help_of,
    report_console,
)
from vllm_spec_ext.cli.many_values import ManyValues, ManyValuesGroup
from vllm_spec_ext.cli.plan_cluster import plan_cluster
from vllm_spec_ext.cli.plan_drafts import conditions, measure_drafts, split_names
from vllm_spec_ext.cli.plan_drafts import show as show_drafts
from vllm_spec_ext.cli.plan_paper import plan_paper
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.cli.written_files import check_writable, printed_last, write_result
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers import registry

plan_app = typer.Typer(add_completion=False, cls=ManyValuesGroup, invoke_without_command=True)
plan_app.command("paper", cls=ManyValues)(plan_paper)
plan_app.command("cluster")(plan_cluster)  # has a file behind its flags
_SIZES = (0, 1, 2, 4, 8, 16, 32, 64)
_LONGEST_CHAIN = 8
_DEFAULTS: dict[str, Any] = {"limit": 12, "max_tokens": 96, "batch_size": [1, 8]}


@dataclass(frozen=True)
class Recorded:
    """What one method drafted, by batch size."""

    method: Method
    recordings: dict[int, Recording]
    context: float  # mean tokens before a step


@plan_app.callback()
def plan(
    context_of_call: typer.Context,
    *,
    model: ModelOption = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=r"NAME or NAME=JSON, as for `bench`; repeatable. \[default: input_copy]"),
    ] = None,
    prompts_file: PromptsOption = None,
    field: FieldOption = None,
    template: TemplateOption = None,
    dataset: DatasetOption = None,
    raw: RawOption = None,
    limit: Annotated[
        int | None, typer.Option(help=help_of("limit", f"{_DEFAULTS['limit']}, or the batch size"))
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help=help_of("max_tokens", _DEFAULTS["max_tokens"]))
    ] = None,
    batch_size: Annotated[
        list[str] | None,
        typer.Option(
            help="Comma-separated; repeatable. " + help_of("batch_size", _DEFAULTS["batch_size"])
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help=r"Tokens before the timed steps. \[default: as when recorded]"),
    ] = None,
    dtype: DtypeOption = None,
    engine_arg: EngineArgOption = None,
    drafts: Annotated[
        list[str] | None,
        typer.Option(
            help="Draft models to rank instead of methods, folders or names; A+B drafts with both."
        ),
    ] = None,
    chain: Annotated[
        int | None,
        typer.Option(min=1, max=64, help=r"With --drafts: longest chain. \[default: 8]"),
    ] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=RATIO: with --drafts, predict for a draft whose pass takes this part of a "
            r"target's step. \[default: bounds for 7B with 68M, 70B with 1B]"
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help="With --drafts, predict this expansion tree, too: the children of each node, step "
            "by step, e.g. 4,1,1,1; repeatable."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this SVG file.")] = None,
) -> None:
    """Measure how long a step takes by batch size and draft tokens, and what methods gain by it.

    Each method, as configured, answers prompts at each batch size with its drafts on record; then
    steps are timed with so many tokens to verify. Gains are of decoding; prefill is the same. Other
    defaults than `bench`: the small demo model, 12 prompts, 96 tokens, batch sizes 1,8.

    With --drafts it ranks draft models by expected speed: the target's answers are recorded, each
    draft's guesses are compared with them, and passes of target and drafts are timed.

    Where the GPU is not at hand, `vllm-spec plan paper` predicts without measuring anything.
    `vllm-spec plan cluster` simulates replicas under load with what this measured.

    Exit status: 0 if all went well, 1 if an engine failed, 2 for bad input.
    """
    if context_of_call.invoked_subcommand:
        refuse_options(context_of_call)
        return
    if drafts and (method or plot):
        raise SpecExtError("--drafts ranks draft models; drop --method and --plot")
    if not drafts and (pair or tree or chain):
        raise SpecExtError("--chain, --pair and --tree are for draft models; name some by --drafts")
    names = split_names(drafts or [])
    pairs = tuple(Pair.parse(text) for text in pair) if pair else PAIRS
    expansions = tuple(parse_tree(text) for text in tree or [])
    methods = [] if drafts else [_own_method(text) for text in method or ["input_copy"]]
    if plot is not None:
        figures.require_matplotlib()  # before minutes of measuring
    check_writable(json_file, plot)
    given: dict[str, Any] = {
        "prompts": prompts_file,
        "field": field,
        "template": parse_template(template),
        "datasets": datasets.parse(dataset) if dataset else None,
        "raw": raw,
        "limit": limit,
        "max_tokens": max_tokens,
        "batch_size": parse_batch_sizes(",".join(batch_size)) if batch_size else None,
        "dtype": dtype,
        "engine_args": parse_engine_args(engine_arg) if engine_arg else None,
    }
    defaults = {**_DEFAULTS, "limit": max(_DEFAULTS["limit"], *(given["batch_size"] or [1]))}
    errors = Console(stderr=True)
    settings = merge(defaults, {**given, "model": model or "demo"})
    questions = settings.questions()
    if not drafts:  # with them the batch size is no more than how many are asked at once
        settings = filled_batches(settings, len(questions), errors)
    if model is None:
        settings = settings.model_copy(update={"model": demo_model()})
    with tempfile.TemporaryDirectory(prefix="vllm-spec-plan-") as logs:
        try:
            if drafts:
                planned = measure_drafts(
                    settings,
                    questions,
                    names,
                    longest=chain or _LONGEST_CHAIN,
                    pairs=pairs,
                    trees=expansions,
                    context=context,
                    folder=Path(logs),
                    measure_times=measure_times,
                    report=lambda line: errors.print(line, markup=False, highlight=False),
                )
                with printed_last(lambda: show_drafts(planned, report_console())):
                    if json_file is not None:
                        whole = {**conditions(settings, questions), **planned.as_dict()}
                        write_result(json_file, json.dumps(whole, indent=1))
                return
            found = []
            for wanted in methods:
                errors.print(f"recording {wanted.name} ...", markup=False, highlight=False)
                found.append(record_method(wanted, settings, questions, Path(logs)))
            tokens = context or max(1, round(statistics.fmean(one.context for one in found)))
            largest = {largest_draft(wanted) for wanted in methods}
            nodes = sorted({size for size in _SIZES if size < max(largest)} | largest)
            errors.print("measuring steps ...")
            times = measure_times(settings, nodes, tokens, shapes_of(found), Path(logs))
        except EngineFailed as error:
            errors.print(f"vllm-spec: {error}", markup=False, highlight=False)
            raise typer.Exit(EXIT_FAILED) from error
    gains = gains_of(found, times)
    with printed_last(lambda: show(times, tokens, gains, report_console())):
        if json_file is not None:
            whole = {"context": tokens, **step_seconds(times), "gains": gains}
            write_result(json_file, json.dumps(whole, indent=1))
        if plot is not None:
            write_result(plot, figures.plan_figure(times["chain"], gains))


def refuse_options(call: typer.Context) -> None:
    """Options of `plan` before a command that has its own; raises SpecExtError."""
    for name in call.params:
        source = call.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise SpecExtError(
                f"an option ({name}) stands before {call.invoked_subcommand!r}, which would not "
                f"use it; give options of `plan {call.invoked_subcommand}` behind that word"
            )


def filled_batches(settings: BenchSettings, num_prompts: int, errors: Console) -> BenchSettings:
    """Without the batch sizes that these prompts never fill, whose figures would be of others.

    Raises:
        SpecExtError: None is left.
    """
    filled = [size for size in settings.batch_size if size <= num_prompts]
    missing = ", ".join(str(size) for size in settings.batch_size if size > num_prompts)
    how = "raise --limit, give a file with more prompts, or lower --batch-size"
    if not filled:
        raise SpecExtError(f"{num_prompts} prompts never fill a batch of {missing}; {how}")
    if missing:
        text = f"left out: {num_prompts} prompts never fill a batch of {missing}; {how}"
        errors.print(text, markup=False, highlight=False)
    return settings.model_copy(update={"batch_size": filled})


def record_method(
    method: Method, settings: BenchSettings, questions: Sequence[Question], folder: Path
) -> Recorded:
    """Answer the questions at each batch size, with every draft on record; raises EngineFailed."""
    found: dict[int, Recording] = {}
    with EngineClient(method.name, folder / log_name(method.name)) as client:
        client.start(settings.model, method, settings.llm_args(), sampling_of(settings))
        for size in settings.batch_size:
            # A few requests first: `adaptive_length` learns from them what a token costs at this
            # batch size.
            facts = client.prepare(questions, max(2, size), size)
            rows = client.record(range(len(questions)), size)
            found[size] = read_recording(rows["steps"], rows["propose_us"])
    if not all(one.requests for one in found.values()):
        raise SpecExtError("the answers are one token long; raise --max-tokens")
    first = found[min(found)]
    tokens = first.tokens_per_step * len(first.steps) / len(first.requests)
    return Recorded(method, found, statistics.fmean(facts.prompt_lengths) + tokens / 2)


def _own_method(text: str) -> Method:
    found = parse_method(text)
    if not found.ours:
        raise SpecExtError(
            f"{found.name}: only this plugin's methods record their drafts; expected one of "
            + ", ".join(registry.names())
        )
    return found


def measure_times(
    settings: BenchSettings,
    nodes: Sequence[int],
    context: int,
    shapes: Sequence[Shape],
    folder: Path,
) -> dict[Shape, StepTimes]:
    """Times of steps with drafts of some shapes, measured in a process of their own.

    Raises:
        SpecExtError: Settings that do not fit together.
        EngineFailed: It ended without them.
    """
    path = folder / "times.json"
    arguments = {"dtype": settings.dtype, **settings.engine_args}
    found = measure_apart(
        "vllm_spec_ext.bench.step_probe",
        [
            *("--model", settings.model, "--shapes", *shapes, "--sizes", *map(str, nodes)),
            *("--batch-sizes", *map(str, settings.batch_size), "--context", str(context)),
            *("--rounds", "2", "--engine-args", json.dumps(arguments)),
        ],
        path,
        "steps could not be measured",
    )
    tables: dict[Shape, dict[int, dict[int, float]]] = {shape: {} for shape in shapes}
    for row in found["rows"]:
        for shape, table in tables.items():
            table.setdefault(row["batch"], {})[row["nodes"]] = row[shape] / 1e3
    return {shape: StepTimes(table) for shape, table in tables.items()}


def shapes_of(found: Sequence[Recorded]) -> tuple[Shape, ...]:
    """Forms of drafts whose steps are to be timed."""
    trees = any(one.branches for each in found for one in each.recordings.values())
    return ("chain", "wide") if trees else ("chain",)


def step_seconds(times: Mapping[Shape, StepTimes]) -> dict[str, Any]:
    """As :meth:`StepTimes.read` reads it."""
    found = {"step_seconds": times["chain"].table}
    if "wide" in times:
        found["step_seconds_with_branches"] = times["wide"].table
    return found


def largest_draft(method: Method) -> int:
    """``num_speculative_tokens`` as given, or the method's default."""
    config = method.config or {}
    default = registry.info(str(config["method"])).num_speculative_tokens
    return int(config.get("num_speculative_tokens") or default or 1)


def gains_of(found: Sequence[Recorded], times: Mapping[Shape, StepTimes]) -> list[dict[str, Any]]:
    """A row for each method and batch size, each under steps of the form of its drafts."""
    return [
        {
            "method": one.method.name,
            "config": one.method.config,
            "batch": size,
            "tokens_per_step": recording.tokens_per_step,
            "nodes_per_step": recording.nodes_per_step,
            "drafter_us": recording.drafter_s * 1e6,
            "branches": recording.branches,
            "speed_up": expected_speed_up(recording, size, times["chain"], times.get("wide")),
            "acceptance_per_position": recording.acceptance_per_position,
        }
        for one in found
        for size, recording in one.recordings.items()
    ]


def show(
    times: Mapping[Shape, StepTimes],
    context: int,
    gains: Sequence[Mapping[str, Any]],
    console: Console,
) -> None:
    """Print step times, gains, and acceptance by position."""
    for shape, measured in times.items():
        nodes = sorted(next(iter(measured.table.values())))
        rows = [
            [str(size), *(f"{row[n] * 1e3:.1f} ({row[n] / row[0]:.2f})" for n in nodes)]
            for size, row in sorted(measured.table.items())
        ]
        drafts = "with four branches" if shape == "wide" else "without branches"
        title = (
            f"ms of a step after {context} tokens, by draft tokens of each request {drafts} "
            "(times plain)"
        )
        WholeTable(["batch", *map(str, nodes)], rows, title).print(console)
    import torch  # slow to import

    if torch.cuda.is_available():
        console.print(
            "Plain steps were timed in an engine that waits for each step, as methods do that "
            "draft on the host; plain decoding with asynchronous scheduling is faster: see `bench`",
            markup=False,
            highlight=False,
        )
    rows = [
        [
            gain["method"],
            str(gain["batch"]),
            f"{gain['tokens_per_step']:.2f}",
            f"{gain['nodes_per_step']:.1f}",
            f"{gain['drafter_us']:.0f}",
            f"{gain['speed_up']:.2f}x",
        ]
        for gain in gains
    ]
    headings = ["method", "batch", "tokens/step", "verified/step", "drafter us", "decoding"]
    WholeTable(headings, rows, "expected speed over plain decoding's").print(console)
    for gain in gains:
        shares = " ".join(f"{share:.2f}" for share in gain["acceptance_per_position"])
        line = f"{gain['method']} (batch {gain['batch']}), accepted per position: {shares}"
        console.print(line, markup=False, highlight=False)
