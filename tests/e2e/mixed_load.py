# SPDX-License-Identifier: Apache-2.0
"""A mixed load at a moderate rate on one server, or the same one on two whose texts must agree."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fuzz_load import LIMIT_S, NAME, Report, Server, send
from process_samples import Sample, grew, growth, row, sample
from request_fuzz import FuzzRequest, generate_mixed

from vllm_spec_ext.proposers import registry

CLIENTS = 8
PAUSE_S = 0.4  # at most, between two requests of a client: others use this machine too
SAMPLE_S = 60.0
WARM_S = 300.0


@dataclass
class Mismatch:
    """A request that was answered with different texts, by name of the server."""

    request: FuzzRequest
    texts: Mapping[str, str | None]
    alone: Mapping[str, str | None] = field(default_factory=dict)  # asked again when all was quiet

    def text(self) -> str:
        """For people."""
        return f"different texts: {self.texts}\n  again, alone: {self.alone}\n  {self.request}"


@dataclass
class MixedReport:
    """What became of a mixed load."""

    reports: dict[str, Report]
    samples: dict[str, list[Sample]]
    compared: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def grown(self) -> list[str]:
        """What the servers held more of as time went by."""
        found = (grew(name, taken, WARM_S) for name, taken in self.samples.items())
        return [text for text in found if text is not None]

    @property
    def failed(self) -> bool:
        """Whether anything was wrong with an answer, or grew."""
        wrong = any(report.failures for report in self.reports.values())
        return bool(self.mismatches or self.grown) or wrong

    def text(self) -> str:
        """For people."""
        lines = []
        for name, report in self.reports.items():
            lines += [f"{name}: {report.text()}", growth(name, self.samples[name], WARM_S)]
        lines += [f"texts compared: {self.compared}, different: {len(self.mismatches)}"]
        lines += self.grown or ["nothing grows, as far as the run is long enough to say"]
        return "\n".join([*lines, *(mismatch.text() for mismatch in self.mismatches[:10])])


def mixed_load(
    servers: Mapping[str, Server],
    method: str,
    seed: int,
    minutes: float,
    say: Callable[[str], None],
) -> MixedReport:
    """Send every request to every server until the time is over.

    Args:
        servers: By name; the texts of all are compared.
        method: Whose request options are sent.
        seed: Decides the requests, not when they are sent.
        minutes: How long.
        say: Takes a line of the table of samples, once a minute.
    """
    return asyncio.run(_mixed_load(servers, method, seed, minutes, say))


async def _mixed_load(
    servers: Mapping[str, Server],
    method: str,
    seed: int,
    minutes: float,
    say: Callable[[str], None],
) -> MixedReport:
    import aiohttp

    found = MixedReport({name: Report() for name in servers}, {name: [] for name in servers})
    fields = list(registry.info(method).request_options.model_fields)
    requests = generate_mixed(seed, NAME, fields)
    pauses = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    start = time.monotonic()
    end = start + 60 * minutes

    async def client(session: Any) -> None:
        while time.monotonic() < end:
            await _send_to_all(session, servers, next(requests), found)
            await asyncio.sleep(pauses.uniform(0, PAUSE_S))

    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        watch = asyncio.create_task(_watch(servers, found, start, say))
        try:
            await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
        finally:
            watch.cancel()
        _take(servers, found, time.monotonic() - start, say)
        for report in found.reports.values():
            report.seconds = time.monotonic() - start
        for mismatch in found.mismatches:
            mismatch.alone = {
                name: await send(session, server, mismatch.request, (), Report())
                for name, server in servers.items()
            }
    return found


async def _send_to_all(
    session: Any, servers: Mapping[str, Server], request: FuzzRequest, found: MixedReport
) -> None:
    texts = await asyncio.gather(
        *(
            send(session, server, request, (), found.reports[name])
            for name, server in servers.items()
        )
    )
    if request.same:
        found.compared += 1
        if len(set(texts)) > 1:
            found.mismatches.append(Mismatch(request, dict(zip(servers, texts, strict=True))))


async def _watch(
    servers: Mapping[str, Server], found: MixedReport, start: float, say: Callable[[str], None]
) -> None:
    while True:
        _take(servers, found, time.monotonic() - start, say)
        await asyncio.sleep(SAMPLE_S)


def _take(
    servers: Mapping[str, Server], found: MixedReport, seconds: float, say: Callable[[str], None]
) -> None:
    for name, server in servers.items():
        if server.process.poll() is not None:
            continue
        taken = sample(server.process.pid, seconds)
        found.samples[name].append(taken)
        say(row(name, taken))
