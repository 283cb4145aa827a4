# SPDX-License-Identifier: Apache-2.0
"""Replicas under load, as discrete events: when drafts help a cluster, and when they must be off.

A replica runs one engine step after the other. A step takes what ``plan`` measured for so many
decoding requests that verify so many nodes, and the drafter's time; prompts ride along, up to the
engine's tokens a step. What is not modelled: memory (preemption), prefix caching, and answers that
differ in how well they are drafted; each request gets the mean number of tokens in every step.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vllm_spec_ext.bench.planner import StepTimes
from vllm_spec_ext.errors import SpecExtError

if TYPE_CHECKING:
    import simpy

Mode = Literal["off", "on", "where it pays"]
MODES: tuple[Mode, ...] = ("off", "on", "where it pays")
Routing = Literal["least-loaded", "round-robin"]
WARM_UP = 0.1  # part of the requests that is not counted


@dataclass(frozen=True)
class Arrival:
    """A request, as it comes."""

    at: float  # seconds
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Costs:
    """Of one replica's steps."""

    times: StepTimes
    drafts: Mapping[int, tuple[float, float, float]]
    """By batch size: tokens a step, nodes a step, seconds of the drafter."""
    prompt_token_s: float

    @classmethod
    def read(cls, path: Path, method: str | None, prompt_token_us: float | None) -> "Costs":
        """From what ``plan --json`` wrote.

        Args:
            path: The file.
            method: As it is called there; None = the only one.
            prompt_token_us: Microseconds of a prompt's token; None = as a verified one's at the
                smallest batch, which is an approximation.

        Raises:
            SpecExtError: It holds something else, or no such method.
        """
        chains = StepTimes.read(path)
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["gains"]
            found: dict[str, dict[int, tuple[float, float, float]]] = {}
            branching = set()
            for row in rows:
                drafts = found.setdefault(str(row["method"]), {})
                if row.get("branches"):
                    branching.add(str(row["method"]))
                drafts[int(_figure(row, "batch", 1))] = (
                    _figure(row, "tokens_per_step", 1),
                    _figure(row, "nodes_per_step", 0),
                    _figure(row, "drafter_us", 0) / 1e6,
                )
            if not found:
                raise LookupError("gains are empty")
        except SpecExtError as error:
            raise SpecExtError(f"{path}, gains: {error}; run `plan --json` again") from error
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            raise SpecExtError(
                f"{path} holds no drafts ({error!r}); expected what `plan --json` wrote"
            ) from error
        if method is None and len(found) == 1:
            (method,) = found
        if method not in found:
            raise SpecExtError(
                f"{path}: found {method!r}, expected one of its methods: {', '.join(found)}; name "
                "it with --method"
            )
        times = StepTimes.read(path, branches=method in branching)
        row_of_one = chains.table[min(chains.table)]  # a prompt has no branches
        most = max(row_of_one)
        slope = (row_of_one[most] - row_of_one[0]) / most if most else row_of_one[0]
        prompt_token_s = max(slope, 0.0) if prompt_token_us is None else prompt_token_us / 1e6
        return cls(times, found[method], prompt_token_s)

    @property
    def most_requests(self) -> int:
        """The largest batch that was measured."""
        return min(max(self.times.table), max(self.drafts))

    def decode(self, num_requests: int, mode: Mode) -> tuple[float, float]:
        """Seconds of a step of so many requests, and the tokens that each gets."""
        known = self._decoded.get((num_requests, mode))
        if known is None:
            known = self._decoded[num_requests, mode] = self._decode(num_requests, mode)
        return known

    def _decode(self, num_requests: int, mode: Mode) -> tuple[float, float]:
        plain = self._seconds(num_requests, 0.0)
        if mode == "off":
            return plain, 1.0
        tokens, nodes, drafter_s = self._drafted(num_requests)
        drafted = self._seconds(num_requests, nodes) + drafter_s
        if mode == "where it pays" and tokens / drafted <= 1.0 / plain:
            return plain, 1.0
        return drafted, tokens

    def _seconds(self, num_requests: int, nodes: float) -> float:
        sizes = self._sizes
        return float(
            np.interp(num_requests, sizes, [self.times.predict(size, nodes) for size in sizes])
        )

    def _drafted(self, num_requests: int) -> tuple[float, float, float]:
        sizes = sorted(self.drafts)
        columns = zip(*(self.drafts[size] for size in sizes), strict=True)
        tokens, nodes, drafter_s = (float(np.interp(num_requests, sizes, c)) for c in columns)
        return tokens, nodes, drafter_s

    @cached_property
    def _decoded(self) -> dict[tuple[int, Mode], tuple[float, float]]:
        return {}

    @cached_property
    def _sizes(self) -> list[int]:
        return sorted(self.times.table)


def _figure(row: Mapping[str, Any], name: str, least: float) -> float:
    """A number of what `plan` wrote; with another one a simulation might not end."""
    value = float(row[name])
    if not least <= value < math.inf:
        raise SpecExtError(
            f"{name} of {row['method']!r}: found {row[name]}, expected a finite number of at least "
            f"{least}"
        )
    return value


@dataclass(frozen=True)
class Cluster:
    """What serves."""

    costs: Costs
    mode: Mode
    num_replicas: int = 1
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    routing: Routing = "least-loaded"


@dataclass
class Served:
    """What became of a request."""

    arrival: Arrival
    first_at: float = 0.0  # its first token came
    done_at: float = 0.0
    prompt_left: int = 0
    tokens: float = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds to the first token."""
        return self.first_at - self.arrival.at

    @property
    def token_s(self) -> float:
        """Seconds a token behind the first one."""
        return (self.done_at - self.first_at) / max(1, self.arrival.answer_tokens - 1)


@dataclass(eq=False)
class _Replica:
    env: "simpy.Environment"
    cluster: Cluster
    waiting: deque[Served] = field(default_factory=deque)
    running: list[Served] = field(default_factory=list)
    wake: "simpy.Event | None" = None

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Served) -> None:
        self.waiting.append(request)
        if self.wake is not None:
            self.wake.succeed()
            self.wake = None

    def run(self) -> "Generator[simpy.Event, Any, None]":
        cluster, costs = self.cluster, self.cluster.costs
        while True:
            while self.waiting and len(self.running) < cluster.max_num_seqs:
                self.running.append(self.waiting.popleft())
            if not self.running:
                self.wake = self.env.event()
                yield self.wake
                continue
            decoding = [one for one in self.running if not one.prompt_left]
            # A step that reads prompts alone has no drafts.
            mode = cluster.mode if decoding else "off"
            seconds, tokens = costs.decode(max(1, len(decoding)), mode)
            left = cluster.max_num_batched_tokens - len(decoding)
            read: list[tuple[Served, int]] = []
            for one in self.running:
                part = min(one.prompt_left, max(0, left))
                left -= part
                read.append((one, part))
            yield self.env.timeout(seconds + costs.prompt_token_s * sum(n for _, n in read))
            for one in decoding:
                one.tokens += tokens
            for one, part in read:
                one.prompt_left -= part
                if part and not one.prompt_left:
                    one.first_at, one.tokens = self.env.now, 1.0
            for one in self.running:
                if one.tokens >= one.arrival.answer_tokens:
                    one.done_at = self.env.now
            self.running = [one for one in self.running if not one.done_at]


def serve(arrivals: Sequence[Arrival], cluster: Cluster) -> list[Served]:
    """Let a cluster serve these requests.

    Raises:
        SpecExtError: simpy is missing, or a step may hold more requests than were measured.
    """
    try:
        import simpy
    except ImportError as error:
        raise SpecExtError(
            "simulating a cluster needs simpy; install it with `pip install 'vllm-spec-ext[plan]'`"
        ) from error
    most = cluster.costs.most_requests
    if cluster.max_num_seqs > most:
        raise SpecExtError(
            f"steps were measured for up to {most} requests, expected {cluster.max_num_seqs}; "
            "measure larger ones with `plan --batch-size`, or lower --max-num-seqs"
        )
    env = simpy.Environment()
    replicas = [_Replica(env, cluster) for _ in range(cluster.num_replicas)]
    for replica in replicas:
        env.process(replica.run())
    requests = [Served(arrival, prompt_left=max(1, arrival.prompt_tokens)) for arrival in arrivals]

    def come() -> "Generator[simpy.Event, Any, None]":
        for number, request in enumerate(requests):
            yield env.timeout(max(0.0, request.arrival.at - env.now))
            if cluster.routing == "round-robin":
                replica = replicas[number % len(replicas)]
            else:
                replica = min(replicas, key=lambda one: one.load)
            replica.add(request)

    env.process(come())
    env.run()
    return requests


@dataclass(frozen=True)
class Load:
    """What the clients of a cluster saw."""

    mode: Mode
    rate: float  # requests a second
    tokens_per_s: float
    token_ms: float  # mean of the requests' means, behind the first token
    token_ms_p99: float
    wait_ms: float  # to the first token
    wait_ms_p99: float


def summarise(served: Sequence[Served], mode: Mode) -> Load:
    """Figures of the requests that came when the cluster was warm."""
    kept = served[int(WARM_UP * len(served)) :]
    span = max(one.done_at for one in kept) - kept[0].arrival.at
    came = kept[-1].arrival.at - kept[0].arrival.at
    per_token = [1e3 * one.token_s for one in kept]
    waits = [1e3 * one.waited_s for one in kept]
    return Load(
        mode,
        (len(kept) - 1) / came if came else 0.0,
        sum(one.arrival.answer_tokens for one in kept) / span,
        statistics.fmean(per_token),
        float(np.quantile(per_token, 0.99)),
        statistics.fmean(waits),
        float(np.quantile(waits, 0.99)),
    )


def poisson(
    rate: float, number: int, prompt_tokens: int, answer_tokens: int, seed: int = 0
) -> list[Arrival]:
    """Requests that come by chance; answers are shorter and longer, on average as asked.

    Args:
        rate: Requests a second.
        number: Of requests.
        prompt_tokens: Of each.
        answer_tokens: On average; geometrically distributed.
        seed: Of chance.
    """
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1.0 / rate, number))
    lengths = random.geometric(1.0 / answer_tokens, number)
    return [
        Arrival(float(at), prompt_tokens, int(length))
        for at, length in zip(times, lengths, strict=True)
    ]


def read_trace(path: Path) -> list[Arrival]:
    """Requests of a JSON Lines file: ``{"at": 0.5, "prompt_tokens": 400, "answer_tokens": 200}``.

    Raises:
        SpecExtError: Another file; names the line.
    """
    arrivals = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecExtError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found = Arrival(float(row["at"]), int(row["prompt_tokens"]), int(row["answer_tokens"]))
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise SpecExtError(
                f"{path}, line {number}: found {line[:80]!r}, expected "
                '{"at": 0.5, "prompt_tokens": 400, "answer_tokens": 200}'
            ) from error
        if not 0 <= found.at < math.inf or found.prompt_tokens < 1 or found.answer_tokens < 1:
            raise SpecExtError(
                f"{path}, line {number}: found {line[:80]!r}, expected a time from 0 and numbers "
                "from 1"
            )
        arrivals.append(found)
    if not arrivals:
        raise SpecExtError(f"{path} holds no requests")
    return sorted(arrivals, key=lambda arrival: arrival.at)
