# SPDX-License-Identifier: Apache-2.0
"""`vllm-spec simulate`: replay recorded outputs through a proposer, over a grid of settings."""

import io
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_spec_ext.bench import figures
from vllm_spec_ext.bench.planner import StepTimes
from vllm_spec_ext.cli.corpus import load_tokenizer
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.cli.written_files import check_writable, printed_last, write_result
from vllm_spec_ext.errors import SpecExtError, UnsupportedError
from vllm_spec_ext.options import MethodOptions, parse_options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import BaseProposer, EngineHandle
from vllm_spec_ext.replay import Recording, ReplayResult, Row, replay
from vllm_spec_ext.whole_text import check_whole

MOST_IDS = 1 << 22
"""More than any vocabulary has: proposers make tables of its size."""

BUDGET = "num_speculative_tokens"
DEFAULT_BUDGET = 8


@dataclass(frozen=True)
class Point:
    """One setting of the grid, validated."""

    label: str
    budget: int
    options: MethodOptions


def read_recordings(path: Path, tokenizer: object | None, limit: int = 0) -> list[Recording]:
    """Recordings of a JSON lines file.

    Args:
        path: Rows with ``prompt_token_ids`` and ``output_token_ids``, or with the texts ``prompt``
            and ``output``; optionally ``category``, ``max_tokens`` and ``stop_token_ids`` (default:
            the tokenizer's end of a text) as the request asked for, and beside token ids
            ``foreseen``, a list of ``[tokens of the text before a row, draft
            tokens from there to the row, likeliest next tokens, their probabilities]``.
        tokenizer: For texts.
        limit: Most rows; 0 = all.

    Raises:
        SpecExtError: Rows without these fields, texts without a tokenizer, or no rows.
    """
    if not path.is_file():
        raise SpecExtError(f"no such file: {path}; expected recorded outputs as JSON lines")
    recordings: list[Recording] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (not limit or len(recordings) < limit):
                    recordings.append(_recording(line, f"{path}, line {number}", tokenizer))
    except UnicodeDecodeError as error:
        raise SpecExtError(f"{path} is no text in UTF-8 ({error})") from error
    if not recordings:
        raise SpecExtError(f"{path} holds no recordings")
    return recordings


def _recording(line: str, where: str, tokenizer: object | None) -> Recording:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecExtError(f"{where}: not JSON ({error})") from error
    fields = row if isinstance(row, dict) else {}
    category = str(fields.get("category", ""))
    max_tokens = fields.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise SpecExtError(f"{where}: max_tokens is {max_tokens!r}; expected an integer from 1")
    ends = _stop_tokens(fields, where, tokenizer)
    if {"prompt_token_ids", "output_token_ids"} <= fields.keys():
        pair = [fields["prompt_token_ids"], fields["output_token_ids"]]
        for ids in pair:
            if not _are_ids(ids):
                raise SpecExtError(
                    f"{where}: token ids must be a list of integers from 0 to {MOST_IDS - 1}"
                )
        foreseen = _foreseen(fields.get("foreseen", []), where)
        return Recording(pair[0], pair[1], category, foreseen, max_tokens, ends)
    texts = [fields.get("prompt"), fields.get("output")]
    if not all(isinstance(text, str) for text in texts):
        raise SpecExtError(
            f"{where}: found {', '.join(fields) or 'no fields'}; expected prompt_token_ids and "
            "output_token_ids, or the texts prompt and output"
        )
    for name, text in zip(("prompt", "output"), texts, strict=True):
        check_whole(str(text), where, name)
    if tokenizer is None:
        raise SpecExtError(f"{where} holds texts; name the model with --tokenizer")
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]  # type: ignore[attr-defined]
    return Recording(ids[0], ids[1], category, max_tokens=max_tokens, ends=ends)


def _stop_tokens(fields: Mapping[str, Any], where: str, tokenizer: object | None) -> frozenset[int]:
    if "stop_token_ids" not in fields:
        end = getattr(tokenizer, "eos_token_id", None)
        return frozenset() if end is None else frozenset({end})
    ids = fields["stop_token_ids"]
    if not _are_ids(ids):
        raise SpecExtError(
            f"{where}: stop_token_ids must be a list of integers from 0 to {MOST_IDS - 1}"
        )
    return frozenset(ids)


def _foreseen(rows: Any, where: str) -> dict[Row, tuple[list[int], list[float]]]:
    try:
        found = {
            (int(size), *map(int, path)): ([*map(int, tokens)], [*map(float, probs)])
            for size, path, tokens, probs in rows
        }
    except (TypeError, ValueError) as error:
        raise SpecExtError(
            f"{where}: foreseen: expected a list of [tokens of the text before a row, draft tokens "
            f"from there to the row, likeliest next tokens, their probabilities] ({error})"
        ) from error
    if len({len(part) for pair in found.values() for part in pair}) > 1:
        raise SpecExtError(f"{where}: foreseen: expected equally many next tokens in each row")
    if not all(_is_id(token) for tokens, _ in found.values() for token in tokens):
        raise SpecExtError(f"{where}: foreseen: expected token ids from 0 to {MOST_IDS - 1}")
    return found


def _are_ids(ids: object) -> bool:
    return isinstance(ids, list) and all(type(i) is int and _is_id(i) for i in ids)


def _is_id(token: int) -> bool:
    return 0 <= token < MOST_IDS


def parse_grid(settings: Sequence[str]) -> list[dict[str, Any]]:
    """All combinations of ``key=v1,v2`` settings; values are JSON where they parse as such.

    Raises:
        SpecExtError: A setting without ``=``, or given twice.
    """
    axes: dict[str, list[Any]] = {}
    for setting in settings:
        key, equals, values = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key or not values:
            raise SpecExtError(f"--set: found {setting!r}, expected key=value or key=v1,v2")
        if key in axes:
            raise SpecExtError(f"--set: {key} is given twice; write {key}=v1,v2")
        whole = _value(values)  # a list or an object is one value, commas and all
        one = isinstance(whole, list | dict)
        axes[key] = [whole] if one else [_value(value) for value in values.split(",")]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def make_points(method: str, grid: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Validate every combination before any runs.

    Raises:
        UnsupportedError: The method needs a model, which replay has not.
        SpecExtError: Unknown method or option, or a value out of range.
    """
    info = registry.info(method)
    if registry.load(method).needs.hidden_states or info.needs_checkpoint:
        raise UnsupportedError(
            f"{method} drafts with a model, so it cannot be replayed without one"
        )
    points = []
    for values in grid:
        given = dict(values)
        budget = given.pop(BUDGET, info.num_speculative_tokens or DEFAULT_BUDGET)
        if type(budget) is not int or not 1 <= budget <= 1024:
            raise SpecExtError(f"{BUDGET}: found {budget!r}, expected an integer from 1 to 1024")
        label = " ".join(f"{key}={value}" for key, value in values.items()) or "defaults"
        points.append(Point(label, budget, parse_options(info.options, given, method)))
    return points


def run_point(
    method: str,
    point: Point,
    recordings: Sequence[Recording],
    tokenizer: object | None,
    tokenizer_name: str,
    batch_size: int,
) -> ReplayResult:
    """Replay one setting with a fresh proposer."""
    instance, engine = start(method, point, recordings, tokenizer, tokenizer_name, batch_size)
    return replay(instance, recordings, engine, batch_size=batch_size)


def start(
    method: str,
    point: Point,
    recordings: Sequence[Recording],
    tokenizer: object | None,
    tokenizer_name: str,
    batch_size: int,
) -> tuple[BaseProposer, EngineHandle]:
    """A proposer that is ready to replay these recordings, and the engine it believes in."""
    cls: type[BaseProposer] = registry.load(method)
    instance: Any = cls(point.options)
    longest = max(
        len(r.prompt_token_ids) + max(len(r.output_token_ids), r.max_tokens or 0)
        for r in recordings
    )
    engine = EngineHandle(
        vocab_size=_vocab_size(recordings, tokenizer),
        max_model_len=longest + point.budget + 2,
        max_num_seqs=batch_size,
        num_speculative_tokens=point.budget,
        model=tokenizer_name or "MODEL",
        load_tokenizer=lambda: tokenizer,
        may_write_files=False,
        may_write_own_files=False,
    )
    widths = {len(tokens) for r in recordings for tokens, _ in r.foreseen.values()}
    needed = instance.needs.next_tokens
    if needed and widths - {needed}:
        raise SpecExtError(
            f"foreseen: found {', '.join(map(str, sorted(widths)))} next tokens in a row, "
            f"{method} needs {needed}; record them again, or leave foreseen out"
        )
    instance.start(engine)
    return instance, engine


def _vocab_size(recordings: Sequence[Recording], tokenizer: object | None) -> int:
    told = (ids for r in recordings for ids in (r.prompt_token_ids, r.output_token_ids))
    foreseen = (tokens for r in recordings for tokens, _ in r.foreseen.values())
    highest = max((max(ids) for ids in itertools.chain(told, foreseen) if ids), default=0)
    if tokenizer is not None:
        from vllm_spec_ext.fingerprint import tokenizer_vocab_size

        highest = max(highest, tokenizer_vocab_size(tokenizer) - 1)
    return highest + 1


def draw(results: Mapping[str, ReplayResult], path: Path) -> None:
    """Plot tokens per step against nodes per step, and acceptance by depth.

    Raises:
        SpecExtError: matplotlib is not installed.
    """
    figure, (left, right) = figures.subplots(2, height=4.0)
    for label, result in results.items():
        left.plot(result.nodes_per_step, result.tokens_per_step, "o", label=label)
        depths = range(1, len(result.acceptance_by_depth) + 1)
        right.plot(depths, result.acceptance_by_depth, marker=".", label=label)
    left.set(xlabel="draft nodes per step", ylabel="tokens per step")
    right.set(xlabel="depth", ylabel="accepted share of drafts this deep", ylim=(0, 1))
    right.legend(fontsize="small")
    drawn = io.BytesIO()
    figures.write(figure, drawn, format=path.suffix[1:].lower())
    write_result(path, drawn.getvalue())


def speed_up(result: ReplayResult, batch_size: int, chains: StepTimes, trees: StepTimes) -> float:
    """Decoding speed to expect over plain decoding's, prefill left out.

    approximation: every step is taken to verify the mean number of nodes; where steps differ and
    the cost rises faster than they do, the truth is lower.
    """
    drafter_s = sum(result.propose_us) / max(1, len(result.propose_us)) * batch_size / 1e6
    times = trees if result.num_branching else chains
    seconds = times.predict(batch_size, result.nodes_per_step) + drafter_s
    return result.tokens_per_step * times.predict(batch_size, 0) / seconds


def _step_times(path: Path, batch_size: int) -> tuple[StepTimes, StepTimes]:
    times, trees = StepTimes.read(path), StepTimes.read(path, branches=True)
    if batch_size not in times.table:
        known = ", ".join(map(str, sorted(times.table)))
        raise SpecExtError(
            f"{path} holds step times of batch sizes {known}, not of {batch_size}; give "
            "--batch-size one of them, or measure it: vllm-spec plan --batch-size"
        )
    return times, trees


def _warn_of_longer_drafts(
    results: Mapping[str, ReplayResult], batch_size: int, times: StepTimes
) -> None:
    most = max(times.table[batch_size])
    beyond = [label for label, result in results.items() if result.nodes_per_step > most]
    if beyond:
        print(
            f"vllm-spec: more draft tokens a step than were measured ({most}), costs are drawn out "
            f"as they rose last: {', '.join(beyond)}; measure more: vllm-spec plan with a larger "
            "num_speculative_tokens",
            file=sys.stderr,
        )


def _table(
    results: Mapping[str, ReplayResult], title: str, speed_ups: Mapping[str, float]
) -> WholeTable:
    headings = ["setting", "tokens/step", "nodes/step", "no draft", "accepted at depth 1 2 4 8"]
    rows: list[list[str]] = []
    for label, result in results.items():
        shares = result.acceptance_by_depth
        shown = " ".join(f"{shares[d - 1]:.2f}" for d in (1, 2, 4, 8) if d <= len(shares))
        rows.append(
            [
                label,
                f"{result.tokens_per_step:.3f}",
                f"{result.nodes_per_step:.1f}",
                f"{result.num_empty / max(1, result.num_steps):.0%}",
                shown,
                f"{result.percentile_us(50):.0f}",
                f"{result.percentile_us(99):.0f}",
                *([f"{speed_ups[label]:.2f}x"] if speed_ups else []),
            ]
        )
    more = ["decoding"] if speed_ups else []
    return WholeTable([*headings, "µs p50", "µs p99", *more], rows, title)


def simulate(
    recordings: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with prompt and output, or prompt_token_ids and output_token_ids."
        ),
    ],
    method: Annotated[str, typer.Option(help="Proposer to replay.")] = "adaptive_ngram",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Option, or several values for a grid: key=v1,v2; may be repeated."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer made the texts or the corpus.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests replayed at a time.")] = 1,
    limit: Annotated[int, typer.Option(min=0, help="First recordings only; 0 = all.")] = 0,
    by_category: Annotated[bool, typer.Option(help="A row for each category.")] = False,
    steps: Annotated[
        Path | None,
        typer.Option(help="What `plan --json` wrote: adds the speed-up of decoding to expect."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this file.")] = None,
) -> None:
    """Find good settings in seconds: replay recorded outputs through a proposer, no engine."""
    if plot is not None:
        figures.check_format(plot)
    check_writable(json_file, plot)
    times = None if steps is None else _step_times(steps, batch_size)
    grid = parse_grid(settings or [])
    if len({point.get("adaptive_length") for point in grid}) > 1:
        raise SpecExtError(
            "--set adaptive_length: a replay has no times of steps, so it drafts as much either "
            "way; leave it out"
        )
    points = make_points(method, grid)
    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    items = read_recordings(recordings, loaded, limit)
    groups: dict[str, list[Recording]] = {"": items}
    if by_category:
        groups = {}
        for item in items:
            groups.setdefault(item.category or "none", []).append(item)
    results: dict[str, ReplayResult] = {}
    rows: list[dict[str, Any]] = []
    speed_ups: dict[str, float] = {}
    for point, (group, members) in itertools.product(points, groups.items()):
        result = run_point(method, point, members, loaded, tokenizer or "", batch_size)
        label = f"{point.label} [{group}]" if group else point.label
        results[label] = result
        if times is not None:
            speed_ups[label] = speed_up(result, batch_size, *times)
        rows.append(
            {
                "method": method,
                BUDGET: point.budget,
                "options": point.options.model_dump(mode="json"),
                "setting": point.label,
                "category": group or None,
                **result.summary(),
                "speed_up": speed_ups.get(label),
            }
        )
    tokens = sum(len(item.output_token_ids) for item in items)
    title = f"{method}: {len(items)} recordings, {tokens:,} output tokens, batch {batch_size}"
    with printed_last(lambda: _table(results, title, speed_ups).print(Console())):
        if times is not None:
            _warn_of_longer_drafts(results, batch_size, times[0])
        if json_file is not None:
            write_result(json_file, json.dumps(rows, indent=2) + "\n")
        if plot is not None:
            draw(results, plot)
