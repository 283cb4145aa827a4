# SPDX-License-Identifier: Apache-2.0
"""The worker's end of the counters: what is new since it was asked last."""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import TypedDict, TypeVar

from vllm_spec_ext.engine.watching.metric_names import COUNTERS, ONLINE_GAUGES

KeyT = TypeVar("KeyT", bound=Hashable)


class News(TypedDict, total=False):
    """What a worker counted since the last time; what did not move is left out.

    Made of plain Python numbers, as vLLM's message format (msgpack) carries no others.
    """

    counts: dict[str, float]
    """By name, see ``COUNTERS``."""
    drafter_us: list[float]
    """Each call of the proposer, microseconds."""
    models: dict[str, list[float]]
    """By draft model or view, in the order of ``MODEL_COUNTERS``."""
    sources: dict[str, list[float]]
    """By source of draft tokens, in the order of ``SOURCE_COUNTERS``."""
    strengths: dict[str, dict[str, list[float]]]
    """By source, then strength of its evidence, in the order of ``STRENGTH_COUNTERS``."""
    online: dict[str, float]
    """Latest values by name, see ``ONLINE_GAUGES``, with the time at which the version in use came
    into use (seconds of the clock) in place of its age."""


class WorkerCounts:
    """Owned by the drafter; emptied by the worker whenever it answers the engine."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        self._counts: dict[str, float] = {}
        self._news: News = {}
        self._told: dict[str, tuple[float, ...]] = {}  # totals of each model

    def add(self, **counts: float) -> None:
        """Add to counters by name.

        Raises:
            KeyError: There is no such counter.
        """
        found = self._counts
        for name, count in counts.items():
            if name not in COUNTERS:
                raise KeyError(name)
            if count:
                found[name] = found.get(name, 0) + count

    def time(self, microseconds: float) -> None:
        """Count one call of the proposer."""
        self._news.setdefault("drafter_us", []).append(float(microseconds))

    def model(self, name: str, *totals: float) -> None:
        """What a draft model or view did since the engine started, as ``MODEL_COUNTERS``."""
        told = self._told.get(name, (0.0,) * len(totals))
        self._told[name] = totals
        add_to(self._news.setdefault("models", {}), name, map(_minus, totals, told))

    def source(self, name: str, *counts: float) -> None:
        """Add to the counters of a source, as ``SOURCE_COUNTERS``."""
        add_to(self._news.setdefault("sources", {}), name, counts)

    def strength(self, source: str, strength: str, *counts: float) -> None:
        """Add to the counters of a source's evidence of one strength, as ``STRENGTH_COUNTERS``."""
        by_source = self._news.setdefault("strengths", {})
        add_to(by_source.setdefault(source, {}), strength, counts)

    def online(self, values: Sequence[float]) -> None:
        """Values of ``ONLINE_GAUGES``, in that order; NaN is not known yet.

        Args:
            values: With a time (seconds of the clock) in place of the age.
        """
        named = zip(ONLINE_GAUGES, values, strict=True)
        self._news["online"] = {name: float(v) for name, v in named if not math.isnan(v)}

    def take(self) -> News:
        """What is new; it counts as told."""
        news, self._news = self._news, {}
        if self._counts:
            news["counts"] = {name: float(count) for name, count in self._counts.items()}
            self._counts = {}
        return news


def _minus(one: float, other: float) -> float:
    return one - other


def add_to(sums: dict[KeyT, list[float]], key: KeyT, values: Iterable[float]) -> None:
    """Add values to the running sums of a key, place by place."""
    new = [float(value) for value in values]
    sums[key] = [a + b for a, b in zip(sums.get(key, [0.0] * len(new)), new, strict=True)]
