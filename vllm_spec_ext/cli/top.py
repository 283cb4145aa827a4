# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec top``: what speculation does in a running server, live."""

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Annotated, TypeVar
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import urlopen

import typer
from rich.live import Live

from vllm_spec_ext.cli.bench import report_console
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.errors import SpecExtError

_TIMEOUT_S = 5.0
_OURS = "spec_ext:"
# What Ray makes of a metric's name: its own prefix, and no colon.
_OF_RAY = {"ray_spec_ext_": _OURS, "ray_vllm_": "vllm:"}
_TIMES = f"{_OURS}drafter_microseconds"
_BY_SOURCE = {
    f"{_OURS}source_accepted_nodes_total": "accepted",
    f"{_OURS}source_expected_nodes_total": "expected",
}
_BY_STRENGTH = {
    f"{_OURS}strength_{word}_nodes_total": word for word in ("verified", "accepted", "expected")
}
_ENOUGH = 50  # verified draft tokens of one strength before it is said how far they are off

Key = TypeVar("Key")
Counts = dict[str, float]


@dataclass
class Snapshot:
    """The metrics of one moment."""

    when: float  # seconds
    counters: dict[str, dict[str, float]] = field(default_factory=dict)  # by engine, then name
    sources: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Accepted and expected draft tokens by engine, then source, where there are several."""
    strengths: dict[str, dict[tuple[str, str], dict[str, float]]] = field(default_factory=dict)
    """Verified, accepted and expected ones by engine, then source and strength of its evidence."""
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # drafter time, by engine
    server: dict[str, float] = field(default_factory=dict)  # vLLM's own, all engines together


def read_metrics(text: str, when: float) -> Snapshot:
    """Take apart what ``/metrics`` says; an engine is named "method (rule)".

    On the page of a Ray node each engine of the node is one, its replica's or worker's id behind.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found = Snapshot(when)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels, full = sample.labels, _without_ray(sample.name)
            if full.startswith("vllm:"):
                found.server[full] = found.server.get(full, 0.0) + sample.value
            elif full.startswith(_OURS):
                engine = f"{labels.get('method', '?')} ({labels.get('rule', '?')})"
                replica = labels.get("ReplicaId") or labels.get("WorkerId")
                if replica:
                    engine += f" {replica[:8]}"
                if full == f"{_TIMES}_bucket":
                    bound = float(labels["le"].replace("+Inf", "inf"))
                    found.buckets.setdefault(engine, {})[bound] = sample.value
                elif "strength" in labels:
                    if full in _BY_STRENGTH:
                        by_pair = found.strengths.setdefault(engine, {})
                        counts = by_pair.setdefault((labels["source"], labels["strength"]), {})
                        counts[_BY_STRENGTH[full]] = sample.value
                elif "source" in labels:
                    if full in _BY_SOURCE:
                        by_name = found.sources.setdefault(engine, {})
                        counts = by_name.setdefault(labels["source"], {})
                        counts[_BY_SOURCE[full]] = sample.value
                else:
                    name = full.removeprefix(_OURS).removesuffix("_total")
                    found.counters.setdefault(engine, {})[name] = sample.value
    return found


def _without_ray(name: str) -> str:
    for prefix, ours in _OF_RAY.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def quantile(now: Mapping[float, float], before: Mapping[float, float], share: float) -> float:
    """Upper bound of the bucket that holds this share of the calls in between; nan without any."""
    counts = [(bound, value - before.get(bound, 0.0)) for bound, value in sorted(now.items())]
    total = counts[-1][1] if counts else 0.0
    for bound, count in counts:
        if total and count >= share * total:
            return bound
    return math.nan


def engine_rows(now: Snapshot, before: Snapshot | None) -> Iterable[list[str]]:
    """One row an engine, over the time since ``before`` (since its start without one)."""
    for engine, counters in now.counters.items():
        old = before.counters.get(engine, {}) if before else {}
        since = {name: value - old.get(name, 0.0) for name, value in counters.items()}
        times, old_times = now.buckets.get(engine, {}), (before.buckets if before else {})
        steps, verified = since.get("steps", 0.0), since.get("verified_nodes", 0.0)
        slow = [quantile(times, old_times.get(engine, {}), share) for share in (0.5, 0.99)]
        yield [
            engine,
            "yes" if counters.get("lossless") else "NO",
            _ratio(since.get("emitted_tokens", 0.0), steps),
            _ratio(verified, steps),
            _ratio(since.get("accepted_nodes", 0.0), verified, percent=True),
            _ratio(since.get("accepted_nodes", 0.0), since.get("expected_nodes", 0.0)),
            _acceptance_length(since),
            _ratio(since.get("empty_drafts", 0.0), steps, percent=True),
            f"{since.get('refused_drafts', 0.0):.0f}",
            _ratio(since.get("held_back", 0.0), steps, percent=True),
            " / ".join("-" if math.isnan(value) else f"< {value:g}" for value in slow),
        ]


def accepted_from(now: Snapshot, before: Snapshot | None, engine: str) -> str:
    """Share of the accepted draft tokens that each source named, and how many there were for each
    that was expected of it; "-" where there is one source."""
    earlier = before.counters.get(engine, {}) if before else {}
    accepted = now.counters[engine].get("accepted_nodes", 0.0) - earlier.get("accepted_nodes", 0.0)
    since = _since(now.sources.get(engine, {}), before.sources.get(engine, {}) if before else {})
    best_first = sorted(since.items(), key=lambda pair: -pair[1].get("accepted", 0.0))
    shown = []
    for name, counts in best_first:
        found, expected = counts.get("accepted", 0.0), counts.get("expected", 0.0)
        of_expected = f" ({_ratio(found, expected)})" if expected else ""
        shown.append(f"{name} {_ratio(found, accepted, percent=True)}{of_expected}")
    return ", ".join(shown) or "-"


def widest_gap(now: Snapshot, before: Snapshot | None, engine: str) -> str:
    """The evidence of which most tokens were accepted too many or too few; "" if none is known."""
    old = before.strengths.get(engine, {}) if before else {}
    since = _since(now.strengths.get(engine, {}), old)
    known = {
        pair: (counts.get("accepted", 0.0), counts.get("expected", 0.0))
        for pair, counts in since.items()
        if counts.get("verified", 0.0) >= _ENOUGH and counts.get("expected", 0.0)
    }
    if not known:
        return ""
    widest = max(known, key=lambda pair: abs(known[pair][0] - known[pair][1]))
    return f"widest gap: {', '.join(widest)} ({_ratio(*known[widest])})"


def _since(now: Mapping[Key, Counts], before: Mapping[Key, Counts]) -> dict[Key, Counts]:
    """What was added to each count."""
    return {
        key: {kind: value - before.get(key, {}).get(kind, 0.0) for kind, value in counts.items()}
        for key, counts in now.items()
    }


def restarted(now: Snapshot, before: Snapshot) -> bool:
    """Whether the server began anew in between: a counter fell."""
    return any(
        value < before.counters.get(engine, {}).get("steps", 0.0)
        for engine, counters in now.counters.items()
        for value in [counters.get("steps", 0.0)]
    )


def table(now: Snapshot, before: Snapshot | None) -> WholeTable:
    """The view."""
    seconds = now.when - before.when if before else 0.0
    span = f"last {seconds:.0f} s" if before else "since the server started"
    parts = [span]
    for text, name in (
        ("running", "vllm:num_requests_running"),
        ("waiting", "vllm:num_requests_waiting"),
    ):
        if name in now.server:
            parts.append(f"{now.server[name]:.0f} {text}")
    generated = "vllm:generation_tokens_total"
    if before and seconds > 0 and generated in now.server:
        rate = (now.server[generated] - before.server.get(generated, 0.0)) / seconds
        parts.append(f"{rate:.1f} tok/s")
    headings = [
        "method (rule)",
        "lossless",
        "tokens/step",
        "nodes/step",
        "accepted",
        "of expected",
        "acceptance length",
        "no draft",
        "refused",
        "held back",
        "drafter us p50 / p99",
    ]
    rows = list(engine_rows(now, before))
    if now.sources:
        headings.append("accepted, named by (of expected)")
        for row in rows:
            named = accepted_from(now, before, row[0]).split(", ")
            row.append("\n".join(filter(None, [*named, widest_gap(now, before, row[0])])))
    return WholeTable(headings, rows, ", ".join(parts))


def metrics_page(url: str) -> str:
    """Of a server whose address may be all that is given."""
    whole = url if "://" in url else f"http://{url}"
    parts = urlsplit(whole)
    return whole if parts.path not in ("", "/") else urlunsplit(parts._replace(path="/metrics"))


def fetch(url: str) -> Snapshot:
    """The server's metrics now.

    Args:
        url: Of the server, or of its metrics page.

    Raises:
        SpecExtError: No answer, one that is no metrics page, or none of this plugin's in it.
    """
    url = metrics_page(url)
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode("utf-8")
    except (URLError, OSError, HTTPException, ValueError) as error:
        raise SpecExtError(
            f"no metrics at {url}: {error}; give the address of a running `vllm serve` with --url"
        ) from error
    try:
        found = read_metrics(text, time.monotonic())
    except (ValueError, LookupError) as error:  # what the parser makes of any other text
        raise SpecExtError(
            f"{url} answered with {text[:40]!r}..., expected Prometheus metrics; give the "
            "/metrics address of a running `vllm serve` with --url"
        ) from error
    if not found.counters:
        raise SpecExtError(
            f"{url} shows no {_OURS}* metrics: the server runs none of this plugin's methods, or "
            "was started with --disable-log-stats"
        )
    return found


def top(
    *,
    url: Annotated[
        str, typer.Option(help="The server, or its metrics page.")
    ] = "http://localhost:8000/metrics",
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option(help="Print the figures since the server started, and end.")
    ] = False,
) -> None:
    """Watch a running server's speculation: tokens per step, acceptance, drafter time.

    Ctrl-C ends it. Exit status: 0, or 2 if the server does not answer.
    """
    console = report_console()
    before, now = None, fetch(url)
    if once:
        table(now, None).print(console)
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False) as live,
    ):
        while True:
            view = table(now, before)
            if console.is_terminal:
                live.update(view.on(console), refresh=True)
            else:  # a log gets one table after another
                view.print(console)
            time.sleep(interval)
            before, now = now, fetch(url)
            before = None if restarted(now, before) else before


def _acceptance_length(since: Mapping[str, float]) -> str:
    """Tokens of a step that had a draft, the bonus token included."""
    drafts = since.get("verified_drafts", 0.0)
    return _ratio(drafts + since.get("accepted_nodes", 0.0), drafts)


def _ratio(part: float, whole: float, *, percent: bool = False) -> str:
    if not whole:
        return "-"
    return f"{part / whole:.0%}" if percent else f"{part / whole:.2f}"
