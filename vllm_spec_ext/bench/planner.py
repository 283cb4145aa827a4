# SPDX-License-Identifier: Apache-2.0
"""How much to draft: recorded steps of a method priced with measured step times.

For a cap k, every recorded draft is cut to the k nodes that a budget of k would have drafted (of a
tree the likeliest ones) and its accepted path to what is left of it. An engine step of b requests
that verify v nodes each on average takes T(b, v), interpolated between measured times, and the
drafter's time for the batch. A request's seconds per token follow; as in ``bench``, requests count
alike, and

    speed-up(k, b) = T(b, 0) / mean over requests of (seconds of its steps / its tokens).

The draft after a shorter acceptance would have been another one; that it is not known here is the
approximation. Beside it stands the textbook figure (Leviathan et al. 2023, theorem 3.8)
(1 - a^(k+1)) / ((1 - a)(c k + 1)) with a the acceptance rate of single tokens and c the drafter's
time for one token over a plain step's: it takes verification to be free, and every step to have a
draft of k tokens that are all as likely to stand.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

CAPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a decoding step, by requests in it and draft nodes of each."""

    table: Mapping[int, Mapping[int, float]]  # batch size -> nodes a request -> seconds

    def plain(self, batch_size: float) -> float:
        """A step without drafts; between measured batch sizes interpolated."""
        sizes = sorted(self.table)
        return float(np.interp(batch_size, sizes, [self.table[size][0] for size in sizes]))

    def predict(self, batch_size: int, nodes: float) -> float:
        """A step whose requests verify so many nodes on average."""
        row = self.table[batch_size]
        sizes = sorted(row)
        return float(np.interp(nodes, sizes, [row[size] for size in sizes]))


@dataclass(frozen=True)
class RecordedStep:
    """One decoding step of one request."""

    number: int  # of the engine's step; requests of a batch share it
    num_nodes: int  # verified
    accepted: tuple[int, ...]  # rank of each accepted node, a path: a budget of k drafts ranks < k

    def tokens(self, cap: int) -> int:
        """New tokens if only ``cap`` nodes had been drafted, bonus token included."""
        return 1 + sum(1 for _ in itertools.takewhile(lambda rank: rank < cap, self.accepted))


@dataclass(frozen=True)
class Recording:
    """What a method drafted while so many requests were in flight, and what stood of it."""

    requests: tuple[tuple[RecordedStep, ...], ...]  # steps in which the batch was full
    drafter_s: float  # mean seconds of the proposer in such a step
    branches: bool = False  # some draft was a tree

    @cached_property
    def steps(self) -> list[RecordedStep]:
        """Those of all requests."""
        return [step for request in self.requests for step in request]


@dataclass(frozen=True)
class Plan:
    """What a cap would give, by batch size."""

    cap: int  # num_speculative_tokens
    tokens_per_step: dict[int, float]
    nodes_per_step: dict[int, float]
    seconds_per_token: dict[int, float]
    speed_up: dict[int, float]
    textbook: float

    def speed_up_at(self, batch_size: int, times: StepTimes) -> float:
        """Also between measured batch sizes, from interpolated times."""
        sizes = sorted(self.seconds_per_token)
        seconds = np.interp(batch_size, sizes, [self.seconds_per_token[size] for size in sizes])
        return times.plain(batch_size) / float(seconds)


def read_recording(steps: Sequence[Mapping[str, Any]], propose_us: Sequence[float]) -> Recording:
    """A recording from what the worker's ``StepLog`` and its drafter's clock wrote down.

    Args:
        steps: See ``StepLog.judged``; the first one of each request is its prefill, which gives
            one token without a draft.
        propose_us: Microseconds of the proposer in each step of the engine, the first one's first.

    Only steps in which as many requests decoded as in any are kept: while a batch fills or runs
    empty, a step takes another time, and ``adaptive_length`` allows other drafts.
    """
    requests: dict[str, list[RecordedStep]] = {}
    branches = False
    for row in steps:
        parents = row["parents"]
        chain = list(parents) == list(range(-1, len(parents) - 1))
        branches |= not chain
        ranks = range(len(parents)) if chain else ranks_of(parents, row["path_probs"])
        accepted = tuple(int(ranks[node]) for node in row["accepted"])
        found = RecordedStep(row["step"], len(row["tokens"]), accepted)
        requests.setdefault(row["request_id"], []).append(found)
    decoding = [found[1:] for found in requests.values()]
    sizes = Counter(step.number for found in decoding for step in found)
    whole = max(sizes.values(), default=0)
    full = {number for number, size in sizes.items() if size == whole}
    kept = [tuple(step for step in found if step.number in full) for found in decoding]
    times = [propose_us[number - 1] for number in full if number <= len(propose_us)]
    drafter_s = statistics.fmean(times) / 1e6 if times else 0.0
    return Recording(tuple(found for found in kept if found), drafter_s, branches)


def ranks_of(parents: Sequence[int], path_probs: Sequence[float]) -> list[int]:
    """In which place a growing budget would draft each node: likeliest first, parents first.

    Args:
        parents: [n] parent of each node; parents first.
        path_probs: [n] the proposer's probability of each path; empty if it gives none: then level
            by level. (``mcts`` fills a budget by visits, which this only resembles.)
    """
    keys: list[float] = []
    for node, parent in enumerate(parents):
        above = -math.inf if parent < 0 else keys[parent]
        # Estimates that do not sum to one may rise along a path; nobody drafts a child first.
        keys.append(max(-path_probs[node], above) if path_probs else max(0.0, above + 1))
    ranks = [0] * len(parents)
    for rank, node in enumerate(sorted(range(len(parents)), key=lambda node: (keys[node], node))):
        ranks[node] = rank
    return ranks


def acceptance_rate(steps: Sequence[RecordedStep]) -> float:
    """Share of single draft tokens that stand, given that all before them do: the alpha of papers.

    A draft that is accepted to its end says nothing about the next token.
    """
    accepted = sum(len(step.accepted) for step in steps if step.num_nodes)
    refused = sum(len(step.accepted) < step.num_nodes for step in steps if step.num_nodes)
    return accepted / (accepted + refused) if accepted + refused else 0.0


def acceptance_per_position(steps: Sequence[RecordedStep]) -> list[float]:
    """Share of drafts whose first, second, ... token stands, as vLLM counts."""
    lengths = [len(step.accepted) for step in steps if step.num_nodes]
    return [
        sum(length > position for length in lengths) / len(lengths)
        for position in range(max(lengths, default=0))
    ]


def drafting_cost(recording: Recording, plain_s: float) -> float:
    """The drafter's time for one token over a plain step's: the c of papers."""
    drafted = statistics.fmean(step.num_nodes for step in recording.steps)
    return recording.drafter_s / drafted / plain_s if drafted else 0.0


def textbook(rate: float, cost: float, cap: int) -> float:
    """Leviathan et al. 2023, theorem 3.8."""
    expected = (cap + 1.0) if rate >= 1.0 else (1 - rate ** (cap + 1)) / (1 - rate)
    return expected / (cost * cap + 1)


def plan_for(cap: int, recordings: Mapping[int, Recording], times: StepTimes) -> Plan:
    """Price one cap.

    Args:
        cap: Most nodes of a draft.
        recordings: By batch size; made with a cap at least as large.
        times: Measured on this machine, at those batch sizes.
    """
    tokens, nodes, seconds = {}, {}, {}
    for size, found in recordings.items():
        tokens[size] = statistics.fmean(step.tokens(cap) for step in found.steps)
        nodes[size] = statistics.fmean(min(step.num_nodes, cap) for step in found.steps)
        seconds[size] = _seconds_per_token(cap, found, size, times)
    smallest = recordings[min(recordings)]
    plain = times.plain(min(recordings))
    return Plan(
        cap,
        tokens,
        nodes,
        seconds,
        {size: times.plain(size) / seconds[size] for size in recordings},
        textbook(acceptance_rate(smallest.steps), drafting_cost(smallest, plain), cap),
    )


def _seconds_per_token(cap: int, found: Recording, batch_size: int, times: StepTimes) -> float:
    nodes: dict[int, list[int]] = {}
    for step in found.steps:
        nodes.setdefault(step.number, []).append(min(step.num_nodes, cap))
    seconds = {
        number: times.predict(batch_size, statistics.fmean(each)) + found.drafter_s
        for number, each in nodes.items()
    }
    return statistics.fmean(
        sum(seconds[step.number] for step in request) / sum(step.tokens(cap) for step in request)
        for request in found.requests
    )


def plans(recordings: Mapping[int, Recording], times: StepTimes, largest: int) -> list[Plan]:
    """All caps up to the recorded one."""
    caps = sorted({cap for cap in CAPS if cap < largest} | {largest})
    return [plan_for(cap, recordings, times) for cap in caps]


def best(found: Sequence[Plan], batch_size: int, times: StepTimes) -> Plan:
    """The fastest cap at a batch size; the smallest of equals."""
    return max(found, key=lambda plan: (plan.speed_up_at(batch_size, times), -plan.cap))


def typical_speed_up(speed_ups: Sequence[float]) -> float:
    """Geometric mean."""
    return statistics.geometric_mean(speed_ups)


def ranges(found: Sequence[Plan], times: StepTimes) -> list[tuple[int, int, int]]:
    """(first, last, cap) of each range of batch sizes, cap 0 where no draft pays off.

    Up to the largest measured size, in the form of vLLM's
    ``num_speculative_tokens_per_batch_size``; below the smallest one as at it.
    """
    sizes = sorted(found[0].speed_up)
    result: list[tuple[int, int, int]] = []
    for size in range(sizes[0], sizes[-1] + 1):
        choice = best(found, size, times)
        cap = choice.cap if choice.speed_up_at(size, times) > 1.0 else 0
        if result and result[-1][2] == cap:
            result[-1] = (result[-1][0], size, cap)
        else:
            result.append((size, size, cap))
    return [(1, *result[0][1:]), *result[1:]]  # vLLM wants the first range to start there
