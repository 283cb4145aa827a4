# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec plan cluster``: what a loaded cluster gains, from measured steps."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_spec_ext.bench import cluster, figures
from vllm_spec_ext.bench.cluster import Arrival, Cluster, Costs, Load, Routing
from vllm_spec_ext.cli.bench import report_console
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.cli.written_files import check_writable, printed_last, write_result
from vllm_spec_ext.errors import SpecExtError

_LOADS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1)  # of what the cluster can do without drafts


def plan_cluster(
    *,
    planned: Annotated[Path, typer.Argument(help="What `vllm-spec plan --json` wrote.")],
    method: Annotated[
        str | None, typer.Option(help=r"One of its methods. \[default: the only one]")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines.")] = 2,
    routing: Annotated[
        Routing, typer.Option(help="Where a request goes: to the least loaded, or in turn.")
    ] = "least-loaded",
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, help=r"Requests of a step. \[default: the largest measured batch]"),
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a step, prompts included.")
    ] = 2048,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Comma-separated requests a second; repeatable. "
            r"\[default: by the cluster's speed]"
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 400,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Of a request, on average.")] = 200,
    requests: Annotated[int, typer.Option(min=20, help="Of each load.")] = 1000,
    trace: Annotated[
        Path | None,
        typer.Option(
            help='Requests that came, as JSON lines {"at": 0.5, "prompt_tokens": 400, '
            '"answer_tokens": 200}, instead of a rate.'
        ),
    ] = None,
    prompt_us: Annotated[
        float | None,
        typer.Option(
            min=0, help=r"Microseconds of a prompt token. \[default: as a verified one's]"
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this SVG file.")] = None,
) -> None:
    """Simulate replicas under load with drafts off, on, and on where they pay.

    Step times and drafts are what `plan --json` measured on this machine, at several batch sizes;
    the rest is arithmetic. Memory, the prefix cache, and differences between requests are left out.

    Exit status: 0 if all went well, 2 for bad input.
    """
    costs = Costs.read(planned, method, None if prompt_us is None else prompt_us)
    if plot is not None:
        figures.require_matplotlib()
    check_writable(json_file, plot)
    shape = Cluster(
        costs,
        "off",
        replicas,
        max_num_seqs or costs.most_requests,
        max_num_batched_tokens,
        routing,
    )
    if trace is not None and rate is not None:
        raise SpecExtError("--trace says when requests come; drop --rate")
    if trace is not None:
        batches = [cluster.read_trace(trace)]
    else:
        rates = _rates(rate) if rate else _usual_rates(shape, prompt_tokens, answer_tokens)
        batches = [cluster.poisson(one, requests, prompt_tokens, answer_tokens) for one in rates]
    found = [load for arrivals in batches for load in _loads(shape, arrivals)]
    with printed_last(lambda: _show(found, report_console())):
        if json_file is not None:
            rows = [dataclasses.asdict(load) for load in found]
            write_result(json_file, json.dumps({"simulated": rows}, indent=1))
        if plot is not None:
            write_result(plot, figures.cluster_figure(found))


def _loads(shape: Cluster, arrivals: Sequence[Arrival]) -> list[Load]:
    """The same requests in each mode."""
    return [
        cluster.summarise(cluster.serve(arrivals, dataclasses.replace(shape, mode=mode)), mode)
        for mode in cluster.MODES
    ]


def _rates(given: Sequence[str]) -> list[float]:
    text = ",".join(given)
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise SpecExtError(f"--rate: found {text!r}, expected numbers like 0.5,1,2") from error
    if not all(0 < one < float("inf") for one in found):
        raise SpecExtError(f"--rate: found {text!r}, expected numbers above 0")
    return found


def _usual_rates(shape: Cluster, prompt_tokens: int, answer_tokens: int) -> list[float]:
    """Parts of what the cluster can do with full batches and no drafts."""
    seconds, _ = shape.costs.decode(shape.max_num_seqs, "off")
    per_request = seconds * answer_tokens / shape.max_num_seqs
    per_request += shape.costs.prompt_token_s * prompt_tokens
    return [part * shape.num_replicas / per_request for part in _LOADS]


def _ratio(plain_ms: float, ms: float) -> str:
    """Speed; a dash where answers are one token long, behind which there is none to time."""
    return f"{plain_ms / ms:.2f}x" if ms else "-"


def _show(found: Sequence[Load], console: Console) -> None:
    plain = {load.rate: load for load in found if load.mode == "off"}
    rows = [
        [
            f"{load.rate:.2f}",
            load.mode,
            f"{load.tokens_per_s:.0f}",
            f"{load.token_ms:.1f}",
            f"{load.token_ms_p99:.1f}",
            f"{load.wait_ms:.0f}",
            f"{load.wait_ms_p99:.0f}",
            _ratio(plain[load.rate].token_ms, load.token_ms),
        ]
        for load in found
    ]
    headings = ["requests/s", "drafts", "tokens/s", "ms a token", "p99", "first token ms", "p99"]
    title = "simulated, from measured steps; speed: ms a token beside no drafts"
    WholeTable([*headings, "speed"], rows, title).print(console)
