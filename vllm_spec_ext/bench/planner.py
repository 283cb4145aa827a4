# SPDX-License-Identifier: Apache-2.0
"""What recorded drafts gain under measured step times.

An engine step of b requests that verify v nodes each on average takes T(b, v), interpolated between
measured times, and the drafter's time for the batch. As in ``bench``, requests count alike:

    speed-up(b) = T(b, 0) / mean over requests of (seconds of its steps / its tokens).
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.draft_tree import is_branching


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a decoding step, by requests in it and draft nodes of each."""

    table: Mapping[int, Mapping[int, float]]  # batch size -> nodes a request -> seconds

    @classmethod
    def read(cls, path: Path, *, branches: bool = False) -> "StepTimes":
        """From what ``plan --json`` wrote.

        Args:
            path: The file.
            branches: Of steps with trees, if such were measured.

        Raises:
            SpecExtError: No such file, or another one.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            name, chains = "step_seconds", found["step_seconds"]
            if branches and "step_seconds_with_branches" in found:
                name = "step_seconds_with_branches"
            table = {
                int(b): {int(n): float(s) for n, s in row.items()} for b, row in found[name].items()
            }
            _check_table(table, {int(b) for b in chains})
            return cls(table)
        except OSError as error:
            raise SpecExtError(
                f"cannot read {path}: {error.strerror or error}; expected what `plan --json` wrote"
            ) from error
        except SpecExtError as error:
            raise SpecExtError(f"{path}, {name}: {error}; run `plan --json` again") from error
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise SpecExtError(
                f"{path} holds no step times ({error!r}); expected what `plan --json` wrote"
            ) from error

    def predict(self, batch_size: int, nodes: float) -> float:
        """A step whose requests verify so many nodes on average; 0 is plain decoding.

        approximation: beyond the most that were measured each takes what the last ones took.
        """
        row = self.table[batch_size]
        sizes = sorted(row)
        if len(sizes) > 1 and nodes > sizes[-1]:
            before, last = sizes[-2:]
            slope = (row[last] - row[before]) / (last - before)
            return row[last] + max(0.0, slope) * (nodes - last)
        return float(np.interp(nodes, sizes, [row[size] for size in sizes]))


def _check_table(table: Mapping[int, Mapping[int, float]], sizes: AbstractSet[int]) -> None:
    """Raise SpecExtError for gaps, and for numbers with which nothing can be predicted."""
    if table.keys() != sizes or not sizes:
        found = ", ".join(map(str, sorted(table))) or "none"
        expected = ", ".join(map(str, sorted(sizes))) or "one at least"
        raise SpecExtError(f"holds no step times of batch sizes {expected}; found {found}")
    for size, row in table.items():
        if size < 1:
            raise SpecExtError(f"found a batch of {size} requests, expected 1 or more")
        if 0 not in row:
            raise SpecExtError(f"batch size {size}: no time of a step with 0 draft tokens")
        for nodes, seconds in row.items():
            if nodes < 0:
                raise SpecExtError(f"batch size {size}: found {nodes} draft tokens")
            if not 0.0 < seconds < math.inf:
                raise SpecExtError(
                    f"batch size {size}, {nodes} draft tokens: found {seconds} s, expected seconds "
                    "above 0"
                )


@dataclass(frozen=True)
class RecordedStep:
    """One decoding step of one request."""

    number: int  # of the engine's step; requests of a batch share it
    num_nodes: int  # verified
    num_accepted: int
    branches: bool = False  # its draft was a tree


@dataclass(frozen=True)
class Recording:
    """What a method drafted while so many requests were in flight, and what stood of it."""

    requests: tuple[tuple[RecordedStep, ...], ...]  # steps in which the batch was full
    drafter_s: float  # mean seconds of the proposer in such a step

    @property
    def branches(self) -> bool:
        """Whether some draft was a tree."""
        return any(step.branches for step in self.steps)

    @cached_property
    def steps(self) -> list[RecordedStep]:
        """Those of all requests."""
        return [step for request in self.requests for step in request]

    @property
    def tokens_per_step(self) -> float:
        """Bonus token included."""
        return 1 + statistics.fmean(step.num_accepted for step in self.steps)

    @property
    def nodes_per_step(self) -> float:
        """Steps without a draft included."""
        return statistics.fmean(step.num_nodes for step in self.steps)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of drafts whose first, second, ... token stands, as vLLM counts."""
        lengths = [step.num_accepted for step in self.steps if step.num_nodes]
        return [
            sum(length > position for length in lengths) / len(lengths)
            for position in range(max(lengths, default=0))
        ]


def read_recording(steps: Sequence[Mapping[str, Any]], propose_us: Sequence[float]) -> Recording:
    """A recording from what the worker's ``StepLog`` and its drafter's clock wrote down.

    Args:
        steps: See ``StepLog.verified``; the first one of each request is its prefill, which gives
            one token without a draft.
        propose_us: Microseconds of the proposer in each step of the engine, the first one's first.

    Only steps in which as many requests decoded as in any are kept: while a batch fills or runs
    empty, a step takes another time, and ``adaptive_length`` drafts other drafts.
    """
    requests: dict[str, list[RecordedStep]] = {}
    for row in steps:
        branches = is_branching(row["parents"])
        found = RecordedStep(row["step"], len(row["tokens"]), len(row["accepted"]), branches)
        requests.setdefault(row["request_id"], []).append(found)
    decoding = [found[1:] for found in requests.values()]
    sizes = Counter(step.number for found in decoding for step in found)
    whole = max(sizes.values(), default=0)
    full = {number for number, size in sizes.items() if size == whole}
    kept = [tuple(step for step in found if step.number in full) for found in decoding]
    times = [propose_us[number - 1] for number in full if number <= len(propose_us)]
    drafter_s = statistics.fmean(times) / 1e6 if times else 0.0
    return Recording(tuple(found for found in kept if found), drafter_s)


def expected_speed_up(
    found: Recording, batch_size: int, chains: StepTimes, trees: StepTimes | None = None
) -> float:
    """Decoding speed over plain decoding's, prefill left out.

    Args:
        found: What was drafted.
        batch_size: Requests in a step.
        chains: Steps without branches.
        trees: Steps with some; None = as those without.
    """
    together: dict[int, list[RecordedStep]] = {}
    for step in found.steps:
        together.setdefault(step.number, []).append(step)
    seconds = {}
    for number, steps in together.items():
        times = trees if trees and any(step.branches for step in steps) else chains
        nodes = statistics.fmean(step.num_nodes for step in steps)
        seconds[number] = times.predict(batch_size, nodes) + found.drafter_s
    each = [
        sum(seconds[step.number] for step in request)
        / sum(1 + step.num_accepted for step in request)
        for request in found.requests
    ]
    return chains.predict(batch_size, 0) / statistics.fmean(each)
