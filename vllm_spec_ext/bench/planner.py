# SPDX-License-Identifier: Apache-2.0
"""How much to draft: recorded steps of a method priced with measured step times.

For a cap k, every recorded draft is cut to its first k nodes and its accepted path to what is left
of it. That gives the tokens per step E(k) and the nodes v that each step would verify. A step of b
requests that verify v nodes each takes T(b, v), interpolated between measured times; so

    speed-up(k, b) = E(k) * T(b, 0) / mean over steps of (T(b, v) + drafter time).

The draft after a shorter acceptance would have been another one; that it is not known here is the
approximation. Beside it stands the textbook figure (Leviathan et al. 2023, theorem 3.8)
(1 - a^(k+1)) / ((1 - a)(c k + 1)) with a the acceptance rate of single tokens and c the drafter's
time over a plain step's: it takes verification to be free.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CAPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a decoding step, by requests in it and draft nodes of each."""

    table: Mapping[int, Mapping[int, float]]  # batch size -> nodes a request -> seconds

    def plain(self, batch_size: int) -> float:
        """A step without drafts."""
        return self.table[batch_size][0]

    def predict(self, batch_size: int, nodes: Sequence[float]) -> float:
        """Mean time of steps whose requests verify so many nodes, one entry a step."""
        row = self.table[batch_size]
        sizes = sorted(row)
        return float(np.interp(nodes, sizes, [row[size] for size in sizes]).mean())


@dataclass(frozen=True)
class RecordedStep:
    """One decoding step of one request."""

    num_nodes: int  # verified
    accepted: tuple[int, ...]  # indices of the accepted nodes, a path


@dataclass(frozen=True)
class Plan:
    """What a cap would give."""

    cap: int  # num_speculative_tokens
    tokens_per_step: float
    nodes_per_step: float
    speed_up: dict[int, float]  # by batch size
    textbook: float


def read_steps(traces: Sequence[Mapping[str, Any]]) -> list[RecordedStep]:
    """Decoding steps of traced requests (see ``EngineServer.trace``), the prefill's left out."""
    steps = []
    for trace in traces:
        # The first record is the prefill, which gives one token without a draft.
        for record in trace["steps"][1:]:
            steps.append(RecordedStep(len(record["tokens"]), tuple(record["accepted"])))
    return steps


def acceptance_rate(steps: Sequence[RecordedStep]) -> float:
    """Share of single draft tokens that stand, given that all before them do: the alpha of papers.

    A draft that is accepted to its end says nothing about the next token.
    """
    accepted = sum(len(step.accepted) for step in steps if step.num_nodes)
    refused = sum(len(step.accepted) < step.num_nodes for step in steps if step.num_nodes)
    return accepted / (accepted + refused) if accepted + refused else 0.0


def plan_for(cap: int, steps: Sequence[RecordedStep], times: StepTimes, drafter_s: float) -> Plan:
    """Price one cap.

    Args:
        cap: Most nodes of a draft.
        steps: Recorded with a larger one.
        times: Measured on this machine.
        drafter_s: Seconds of the proposer in a step of one request.
    """
    nodes = [min(step.num_nodes, cap) for step in steps]
    tokens = [1 + sum(node < cap for node in step.accepted) for step in steps]
    expected = statistics.fmean(tokens)
    speed_up = {
        size: expected * times.plain(size) / (times.predict(size, nodes) + drafter_s * size)
        for size in times.table
    }
    rate = acceptance_rate(steps)
    cost = drafter_s / times.plain(min(times.table))
    textbook = (cap + 1.0) if rate >= 1.0 else (1 - rate ** (cap + 1)) / (1 - rate)
    return Plan(cap, expected, statistics.fmean(nodes), speed_up, textbook / (cost * cap + 1))


def plans(
    steps: Sequence[RecordedStep], times: StepTimes, drafter_s: float, largest: int
) -> list[Plan]:
    """All caps up to the recorded one."""
    caps = sorted({cap for cap in CAPS if cap < largest} | {largest})
    return [plan_for(cap, steps, times, drafter_s) for cap in caps]


def best(found: Sequence[Plan], batch_size: int) -> Plan:
    """The fastest cap at a batch size; the smallest of equals."""
    return max(found, key=lambda plan: (plan.speed_up[batch_size], -plan.cap))


def ranges(found: Sequence[Plan]) -> list[tuple[int, int, int]]:
    """(first, last, cap) of each range of batch sizes, cap 0 where no draft pays.

    In the form of vLLM's ``num_speculative_tokens_per_batch_size``.
    """
    sizes = sorted(found[0].speed_up)
    result: list[tuple[int, int, int]] = []
    for index, size in enumerate(sizes):
        choice = best(found, size)
        cap = choice.cap if choice.speed_up[size] > 1.0 else 0
        first = 1 if index == 0 else size
        last = sizes[index + 1] - 1 if index + 1 < len(sizes) else size
        if result and result[-1][2] == cap:
            result[-1] = (result[-1][0], last, cap)
        else:
            result.append((first, last, cap))
    return result
