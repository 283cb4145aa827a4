# SPDX-License-Identifier: Apache-2.0
"""Load tests of running servers: vLLM's own ``vllm bench serve`` does the work, we compare.

The servers take turns, pass by pass. The first one is the baseline: its answers are what the
others' are compared with, and its throughput what theirs is divided by. A server remembers prompts
and answers (prefix cache, earlier answers), so each pass has prompts that no pass before it had,
and each run draws a new seed for them unless one is given; for the same reason the warm-up is
ours, not vLLM's, which sends a pass's first prompt.
"""

import json
import math
import random
import secrets
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from vllm_spec_ext.bench.datasets import COPY_RATE, MADE_HERE
from vllm_spec_ext.bench.session import rotated
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.bench.statistics import Spread
from vllm_spec_ext.errors import SpecExtError

HEADINGS = [
    "server",
    "in flight",
    "requests/s",
    "tok/s",
    "speed-up",
    "TTFT ms p50/p99",
    "token ms p50/p99",
    "ITL ms mean/p99",
    "accepted + 1",
    "failed",
    "identical",
]


ANSWERED = "vllm:request_success_total{"  # a counter for each reason to finish
WARM_UP_PROMPT = "Count from one to twenty: one, two, three,"  # of no pass
WARM_UP_TOKENS = 16
WARM_UP_TIMEOUT_S = 600.0  # a server may compile at its first request


@dataclass(frozen=True)
class Load:
    """How requests arrive."""

    max_in_flight: int
    rate: float  # requests per second; 0 sends as many at once as may be in flight


@dataclass(frozen=True)
class Pass:
    """One run of ``vllm bench serve``; ``result`` is what it saved."""

    server: str
    load: Load
    repeat: int
    result: Mapping[str, Any]


def with_seed(settings: BenchSettings) -> BenchSettings:
    """Settings whose seed is the user's, or else one that no other run has."""
    if "seed" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"seed": secrets.randbelow(2**31)})


def run_passes(settings: BenchSettings, say: Callable[[str], None]) -> Iterator[Pass]:
    """Drive every server with every load; raises SpecExtError if a pass fails.

    Args:
        settings: Their ``seed`` decides which prompts are sent, see :func:`with_seed`.
        say: Receives a line for each pass, and what deserves a word.
    """
    say(f"prompts drawn with seed {settings.seed}; --seed {settings.seed} sends the same again")
    served_names = {name: served_model(name, url) for name, url in settings.servers.items()}
    loads = [Load(n, rate) for n in settings.batch_size for rate in settings.request_rate]
    names = list(settings.servers)
    prompts_of_pass = _shares(settings, len(loads) * settings.repeats)
    for warning in _unreached(settings.batch_size, min(map(len, prompts_of_pass))):
        say(warning)
    if not settings.datasets or not settings.datasets.keys() <= set(MADE_HERE):
        for name, url in settings.servers.items():
            if count := answered_before(url):
                say(
                    f"{name} has answered {count} requests already: prompts that were among them "
                    "are sped up by what it remembers; start it again, or use prompts that are "
                    f"new in every run (--dataset {COPY_RATE})"
                )
    for name, url in settings.servers.items():
        for _ in range(settings.warm_up):
            warm_up(name, url, served_names[name])
    with tempfile.TemporaryDirectory(prefix="vllm-spec-serve-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        for load in loads:
            for repeat in range(settings.repeats):
                rows = prompts_of_pass.pop()
                lines = [json.dumps({"prompt": text}) + "\n" for text in rows]
                prompts.write_text("".join(lines), encoding="utf-8")
                for name in rotated(names, repeat):
                    say(f"repeat {repeat + 1}, {_arrival(load)}: {name}")
                    out = Path(folder) / "result.json"
                    arguments = command(settings, name, load, prompts, len(rows), out)
                    _drive([*arguments, f"--served-model-name={served_names[name]}"], name)
                    yield Pass(name, load, repeat, _result(out, name))


def complete(passes: Sequence[Pass], num_servers: int) -> list[Pass]:
    """Those of repeats that all servers ended: others have nothing to be compared with."""
    ended = Counter((one.load, one.repeat) for one in passes)
    return [one for one in passes if ended[one.load, one.repeat] == num_servers]


def _shares(settings: BenchSettings, num_passes: int) -> list[list[str]]:
    """Prompts of each pass: every n-th one, so that all passes get all kinds."""
    questions = settings.questions(random.Random(settings.seed))
    if any(len(question.opening) > 1 for question in questions):
        raise SpecExtError(
            "a prompt is a chat of several messages, which vllm bench serve cannot send; give texts"
        )
    if len(questions) < num_passes:
        raise SpecExtError(
            f"{len(questions)} prompts for {num_passes} passes (loads x repeats); servers remember "
            "what they answered, so each pass needs prompts of its own: give more prompts, or "
            "fewer --repeats"
        )
    return [
        [question.opening[-1]["content"] for question in questions[i::num_passes]]
        for i in range(num_passes)
    ]


def _unreached(batch_sizes: Sequence[int], num_prompts: int) -> list[str]:
    """What to say of numbers in flight that a pass has too few prompts for."""
    return [
        f"a pass has {num_prompts} prompts: {size} in flight are never reached; give more prompts "
        "or fewer --repeats"
        for size in batch_sizes
        if size > num_prompts
    ]


def _result(out: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(out.read_text())
    if not result["completed"]:
        first = next((error for error in result["errors"] if error), "no reason given")
        raise SpecExtError(f"server {name!r} answered none of the requests: {first}")
    return result


def served_model(name: str, url: str) -> str:
    """What the server calls its model; raises SpecExtError if it does not answer."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise SpecExtError(
            f"server {name!r} does not answer at {url}: {error}; start it with vllm serve, and "
            "give the URL without /v1"
        ) from error


def answered_before(url: str) -> int:
    """Requests that a server has answered since its start; 0 if it shows no metrics."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=10) as answer:
            lines = answer.read().decode("utf-8").splitlines()
        counts = [line.rpartition(" ")[2] for line in lines if line.startswith(ANSWERED)]
        return int(sum(map(float, counts)))
    except (OSError, HTTPException, ValueError):
        return 0


def warm_up(name: str, url: str, model: str) -> None:
    """One small answer, untimed; raises SpecExtError if the server does not generate."""
    body = {
        "model": model,
        "prompt": WARM_UP_PROMPT,
        "max_tokens": WARM_UP_TOKENS,
        "temperature": 0.0,
    }
    address = f"{url.rstrip('/')}/v1/completions"
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=WARM_UP_TIMEOUT_S) as answer:
            json.load(answer)["choices"][0]["text"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise SpecExtError(
            f"server {name!r} lists its model, but {address} gave no completion of a small prompt: "
            f"{error}; look at the server's log, or start it again with vllm serve"
        ) from error


def command(
    settings: BenchSettings, name: str, load: Load, prompts: Path, num_prompts: int, out: Path
) -> list[str]:
    """The ``vllm bench serve`` of one pass."""
    arguments = {
        "backend": "vllm",
        "base-url": settings.servers[name].rstrip("/"),
        "model": settings.model,
        "dataset-name": "custom",
        "dataset-path": prompts,
        "num-prompts": num_prompts,
        "custom-output-len": settings.max_tokens,
        "max-concurrency": load.max_in_flight,
        "request-rate": load.rate or math.inf,
        # Both send the first prompt of the pass, which the server then knows; see warm_up.
        "ready-check-timeout-sec": 0,
        "num-warmups": 0,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "result-dir": out.parent,
        "result-filename": out.name,
        "percentile-metrics": "ttft,tpot,itl",
    }
    flags = [f"--{name}={value}" for name, value in arguments.items()]
    switches = ["--save-result", "--save-detailed", "--disable-shuffle", "--disable-tqdm"]
    if settings.raw:
        switches.append("--skip-chat-template")
    start = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    return [*start, *flags, *switches]


def _drive(arguments: list[str], name: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-3:]
        raise SpecExtError(
            f"vllm bench serve failed on {name} (status {done.returncode}): {' | '.join(last)} (it "
            "needs pandas, and --model must be the served one: its tokenizer counts the tokens)"
        )


def table(passes: Sequence[Pass], *, greedy: bool) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: medians over the repeats, and their range for the throughput."""
    baseline = passes[0].server
    groups: dict[tuple[str, Load], list[Pass]] = {}
    for one in passes:
        groups.setdefault((one.server, one.load), []).append(one)
    first = {(p.load, p.repeat): p.result for p in passes if p.server == baseline}
    rows = []
    for (name, load), group in groups.items():
        results = [p.result for p in group]
        ratios = [
            p.result["output_throughput"] / first[p.load, p.repeat]["output_throughput"]
            for p in group
        ]
        rows.append(
            [
                name,
                _arrival(load),
                f"{_median(results, 'request_throughput'):.2f}",
                _spread([r["output_throughput"] for r in results], 1),
                _spread(ratios, 2) + "x",
                f"{_median(results, 'median_ttft_ms'):.0f}/{_median(results, 'p99_ttft_ms'):.0f}",
                f"{_median(results, 'median_tpot_ms'):.1f}/{_median(results, 'p99_tpot_ms'):.1f}",
                _chunk_times(results),
                _accepted(results),
                str(sum(r["failed"] for r in results)),
                _identical(group, first) if greedy else "-",
            ]
        )
    return HEADINGS, rows


def _identical(group: Sequence[Pass], first: Mapping[tuple[Load, int], Mapping[str, Any]]) -> str:
    pairs = [
        (text, other)
        for p in group
        for text, other in zip(
            p.result["generated_texts"],
            first[p.load, p.repeat]["generated_texts"],
            strict=True,
        )
        if text or other  # not two failures
    ]
    return f"{sum(text == other for text, other in pairs)}/{len(pairs)}"


def _arrival(load: Load) -> str:
    return f"{load.max_in_flight}" + (f", {load.rate:g}/s" if load.rate else "")


def _median(results: Sequence[Mapping[str, Any]], key: str) -> float:
    return Spread.of([r[key] for r in results]).median


def _chunk_times(results: Sequence[Mapping[str, Any]]) -> str:
    keys = ("mean_itl_ms", "p99_itl_ms")
    if any(key not in result for result in results for key in keys):
        return "-"
    return "/".join(f"{_median(results, key):.1f}" for key in keys)


def _accepted(results: Sequence[Mapping[str, Any]]) -> str:
    lengths = [r.get("spec_decode_acceptance_length") for r in results]
    known = [length for length in lengths if length is not None]
    return f"{Spread.of(known).median:.2f}" if known else "-"


def _spread(values: Sequence[float], digits: int) -> str:
    s = Spread.of(values)
    return f"{s.median:.{digits}f} [{s.low:.{digits}f}-{s.high:.{digits}f}]"
