# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec bench``: compare speculative methods with plain decoding on this machine."""

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_spec_ext.bench import datasets, provenance, report, saved, served
from vllm_spec_ext.bench.engine_client import EngineFailed
from vllm_spec_ext.bench.markdown_table import markdown_table
from vllm_spec_ext.bench.records import EngineFacts
from vllm_spec_ext.bench.session import BenchResult, Events, run_benchmark
from vllm_spec_ext.bench.settings import (
    BenchSettings,
    merge,
    parse_batch_sizes,
    parse_engine_args,
    parse_rates,
    parse_servers,
    parse_template,
    read_file,
)
from vllm_spec_ext.cli.log_folder import LogFolder
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.cli.written_files import check_writable, printed_last, write_result
from vllm_spec_ext.errors import SpecExtError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
SMOKE = {"limit": 2, "max_tokens": 16, "repeats": 1}


def help_of(name: str, default: object = None) -> str:
    """What a setting is, and its default; brackets would be markup in a help text.

    Args:
        name: Of a field of :class:`BenchSettings`.
        default: In place of the field's own.
    """
    field = BenchSettings.model_fields[name]
    text = " ".join((field.description or "").split())
    default = default or field.get_default(call_default_factory=True)
    shown = ",".join(map(str, default)) if isinstance(default, list) else default
    return text if field.is_required() or shown in (None, {}) else rf"{text} \[default: {shown}]"


# Options that `plan` has, too.
ModelOption = Annotated[str | None, typer.Option(help=help_of("model"))]
PromptsOption = Annotated[str | None, typer.Option("--prompts", help=help_of("prompts"))]
FieldOption = Annotated[str | None, typer.Option(help=help_of("field"))]
TemplateOption = Annotated[str | None, typer.Option(help=help_of("template"))]
RawOption = Annotated[bool | None, typer.Option(help=help_of("raw"))]
DtypeOption = Annotated[str | None, typer.Option(help=help_of("dtype"))]
DatasetOption = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=FILE or NAME=FILE:LIMIT, or copy_rate, needles; repeatable. "
        + help_of("datasets")
    ),
]
EngineArgOption = Annotated[
    list[str] | None, typer.Option(help="key=value. " + help_of("engine_args"))
]


def bench(
    *,
    model: ModelOption = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(help="Comma-separated method names; repeatable. " + help_of("methods")),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="One more method as NAME or NAME=JSON; repeatable. These, and those of --methods, "
            "take the place of the defaults and of those in --config."
        ),
    ] = None,
    ngram_grid: Annotated[bool | None, typer.Option(help=help_of("ngram_grid"))] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON or YAML file with these settings; flags win.")
    ] = None,
    prompts_file: PromptsOption = None,
    field: FieldOption = None,
    template: TemplateOption = None,
    raw: RawOption = None,
    limit: Annotated[int | None, typer.Option(help=help_of("limit"))] = None,
    dataset: DatasetOption = None,
    max_tokens: Annotated[int | None, typer.Option(help=help_of("max_tokens"))] = None,
    batch_size: Annotated[
        list[str] | None,
        typer.Option(help="Comma-separated; repeatable. " + help_of("batch_size")),
    ] = None,
    serve: Annotated[
        list[str] | None, typer.Option(help="NAME=URL; repeatable. " + help_of("servers"))
    ] = None,
    request_rate: Annotated[
        list[str] | None,
        typer.Option(help="Comma-separated; repeatable. " + help_of("request_rate")),
    ] = None,
    repeats: Annotated[int | None, typer.Option(help=help_of("repeats"))] = None,
    warm_up: Annotated[int | None, typer.Option(help=help_of("warm_up"))] = None,
    dtype: DtypeOption = None,
    temperature: Annotated[float | None, typer.Option(help=help_of("temperature"))] = None,
    seed: Annotated[int | None, typer.Option(help=help_of("seed"))] = None,
    max_model_len: Annotated[int | None, typer.Option(help=help_of("max_model_len"))] = None,
    engine_arg: EngineArgOption = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything here, every token included.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables here.")
    ] = None,
    by_category: Annotated[bool, typer.Option(help="Also show figures per category.")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the engines' logs here.")] = None,
    smoke: Annotated[
        bool,
        typer.Option(help="Does everything work? Two prompts, few tokens; small model if none."),
    ] = False,
) -> None:
    """Measure speculative methods against plain decoding, engine by engine, interleaved.

    Exit status: 0 if all went well, 1 if an engine failed or an answer that must be identical is
    not, 2 for bad input, 130 if it was interrupted; passes that were complete are then reported.
    """
    given: dict[str, Any] = {
        "model": model,
        "ngram_grid": ngram_grid,
        "prompts": prompts_file,
        "field": field,
        "template": parse_template(template),
        "raw": raw,
        "limit": limit,
        "datasets": datasets.parse(dataset) if dataset else None,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "warm_up": warm_up,
        "dtype": dtype,
        "temperature": temperature,
        "seed": seed,
        "max_model_len": max_model_len,
    }
    console = Console(stderr=True)
    names = _names(",".join(methods or ()), method)
    given["methods"] = names or None
    given["batch_size"] = parse_batch_sizes(",".join(batch_size)) if batch_size else None
    given["servers"] = parse_servers(serve) if serve else None
    given["request_rate"] = parse_rates(",".join(request_rate)) if request_rate else None
    given["engine_args"] = parse_engine_args(engine_arg) if engine_arg else None
    from_file = read_file(config) if config else {}
    if smoke:
        from_file = {**SMOKE, **from_file}
        if model is None and "model" not in from_file:
            given["model"] = demo_model()
    settings = merge(from_file, given)
    check_writable(json_file, markdown_file)
    facts = provenance.collect(sys.argv)
    if settings.servers or settings.request_rate != [0.0]:
        more = {"log_dir": log_dir, "by_category": by_category or None}
        refuse_unused(settings, {**given, **more}, from_file)
        load_servers(settings, console, facts, json_file, markdown_file)
        return
    try:
        result = run(settings, console, log_dir)
    except EngineFailed as error:  # not the user's input; other errors are main's to print
        console.print(f"vllm-spec: {error}", markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED) from error
    with printed_last(lambda: show(result, facts, report_console(), by_category=by_category)):
        if json_file is not None:
            whole = saved.to_json(result, facts)
            write_result(json_file, json.dumps(whole, indent=1))
        if markdown_file is not None:
            write_result(markdown_file, report.markdown(result, facts))
    if result.stopped_by is not None:
        raise result.stopped_by
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if result.failures or result.broken_promises():
        raise typer.Exit(EXIT_FAILED)


def refuse_unused(
    settings: BenchSettings, given: Mapping[str, Any], from_file: Mapping[str, Any]
) -> None:
    """What a load test of servers does not use must not look as if it did; raises SpecExtError."""
    if not settings.servers:
        raise SpecExtError("request_rate is for running servers; name them with --serve NAME=URL")
    engine = ("methods", "ngram_grid", "dtype", "engine_args", "max_model_len")
    asked = [name for name in engine if given[name] is not None or name in from_file]
    unused = [*asked, *(name for name in ("log_dir", "by_category") if given[name] is not None)]
    if unused:
        raise SpecExtError(
            f"{', '.join(unused)}: running servers have their own; leave that out with --serve"
        )


def load_servers(
    settings: BenchSettings,
    console: Console,
    facts: dict[str, Any],
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Load running servers, print the table, write what was asked for; raises SpecExtError."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    settings = served.with_seed(settings)
    passes: list[served.Pass] = []
    stopped: BaseException | None = None
    try:
        for one in served.run_passes(settings, say):
            passes.append(one)
    # The last two are of the display: a full disk, or nobody reads it any more.
    except (KeyboardInterrupt, SpecExtError, OSError, SystemExit) as error:
        passes = served.complete(passes, len(settings.servers))
        if not passes:
            raise
        stopped = error
        with contextlib.suppress(OSError, SystemExit):
            say(f"vllm-spec: {error}" if str(error) else "vllm-spec: interrupted")
    headings, rows = served.table(passes, greedy=settings.temperature == 0)
    with printed_last(lambda: WholeTable(headings, rows).print(report_console())):
        if json_file is not None:
            whole = {
                "format": saved.SERVED,
                "settings": settings.model_dump(mode="json"),
                "provenance": facts,
                "passes": [asdict(one) for one in passes],
            }
            write_result(json_file, json.dumps(whole, indent=1))
        if markdown_file is not None:
            write_result(markdown_file, markdown_table(headings, rows) + "\n")
    if isinstance(stopped, KeyboardInterrupt):
        raise typer.Exit(EXIT_INTERRUPTED)
    if stopped is not None or any(one.result["failed"] for one in passes):
        raise typer.Exit(EXIT_FAILED)


def run(settings: BenchSettings, console: Console, log_dir: Path | None) -> BenchResult:
    """Run a benchmark with a progress display; raises SpecExtError."""
    result = BenchResult(
        settings,
        settings.all_methods(),
        settings.questions(),
    )
    with LogFolder("bench", log_dir) as logs, ProgressEvents(result, console) as events:
        try:
            run_benchmark(result, logs.path, events)
        finally:  # the message of each names its log, however this ends
            if result.failures:
                logs.keep()
    return result


def demo_model() -> str:
    """Folder of the small demo model, fetched if need be."""
    from vllm_spec_ext.cli.demo_model import ensure_demo_model

    return str(ensure_demo_model())


def report_console() -> Console:
    """Standard output; where it is no terminal, lines are as long as they are."""
    console = Console()
    return console if console.is_terminal else Console(soft_wrap=True)


def show(
    result: BenchResult, facts: dict[str, Any], console: Console, *, by_category: bool
) -> None:
    """Print the report."""
    WholeTable(*report.overview(result)).print(console)
    if result.drifts:
        WholeTable(*report.drift_table(result)).print(console)
    if by_category:
        title = "tokens per step (speed-up) by category"
        WholeTable(*report.by_category(result), title=title).print(console)
        headings, rows = report.slowest_by_category(result)
        if rows:
            WholeTable(headings, rows).print(console)
    summaries = result.summaries()
    lines = [
        *report.acceptance_lines(summaries),
        *report.slowest_lines(result),
        *report.kv_cache_lines(result),
        *report.right_answer_lines(summaries),
    ]
    for line in [*lines, report.caption(result, facts), *report.verdict_lines(result)]:
        console.print(line, markup=False, highlight=False)


class ProgressEvents(Events):
    """Progress bars for engine starts and passes; plain lines where there is no terminal."""

    def __init__(self, result: BenchResult, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        settings = result.settings
        self.num_answers = len(settings.batch_size) * settings.repeats * len(result.questions)
        self.starts = self.progress.add_task("starting engines", total=len(result.methods))
        self.answers = self.progress.add_task(
            "answering", total=self.num_answers * len(result.methods), visible=False
        )

    def __enter__(self) -> "ProgressEvents":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        # What was measured is worth more than how the bars go; rich leaves a closed pipe so.
        with contextlib.suppress(OSError, SystemExit):
            self.close()

    def close(self) -> None:
        """Take the bars away."""
        self.progress.stop()

    def engine_starting(self, name: str) -> None:
        """Show which engine is being started."""
        self.progress.update(self.starts, description=f"starting {name}")
        self._say(f"starting {name}")

    def engine_ready(self, name: str, facts: EngineFacts) -> None:
        """Advance the bar of starts."""
        self.progress.advance(self.starts)
        self._say(f"{name} ready after {facts.start_s:.0f} s ({facts.dtype})")

    def engine_failed(self, name: str, reason: str) -> None:
        """Say why a method is dropped."""
        self.progress.advance(self.starts)
        self.progress.update(
            self.answers, total=(self.progress.tasks[self.answers].total or 0) - self.num_answers
        )
        self.console.print(f"{name} dropped: {reason}", style="red", markup=False, highlight=False)

    def passes_starting(self, batch_size: int, repeat: int) -> None:
        """Show what is being timed."""
        text = f"repeat {repeat + 1}, batch {batch_size}"
        self.progress.update(self.answers, description=text, visible=True)
        self._say(text)

    def answered(self) -> None:
        """Advance the bar of answers."""
        self.progress.advance(self.answers)

    def _say(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False)


def _names(methods: str, extra: Iterable[str] | None) -> list[str]:
    if "{" in methods:
        raise SpecExtError(
            f"--methods: found {methods!r}, expected names; give each method with options by "
            "--method NAME=JSON"
        )
    names = [name.strip() for name in methods.split(",") if name.strip()]
    return [*names, *(extra or ())]
