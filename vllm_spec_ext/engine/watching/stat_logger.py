# SPDX-License-Identifier: Apache-2.0
"""Our metrics among an engine's stat loggers: Prometheus in a server, Ray's metrics there.

Each front end adds up what it is told, as vLLM's own loggers do. vLLM tells each step to one of
several API servers, and Prometheus adds these up; replicas of an engine (data parallelism) tell
theirs to the same front ends.
"""

import functools
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.metrics.loggers import (
    AggregateStatLoggerBase,
    PrometheusStatLogger,
    StatLoggerManager,
)

from vllm_spec_ext.engine.watching.counts import News
from vllm_spec_ext.engine.watching.metric_names import (
    AGE,
    BUCKETS_US,
    COUNTERS,
    LOSSLESS,
    LOSSLESS_TEXT,
    MODEL_COUNTERS,
    ONLINE_GAUGES,
    PREFIX,
    SOURCE_COUNTERS,
    STRENGTH_COUNTERS,
    TIMES,
    TIMES_TEXT,
)
from vllm_spec_ext.engine.watching.stat_channel import take_news

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig

_WRAPPED_BY = "_spec_ext_wrapped"


class Metric(Protocol):
    """As much of a metric of Prometheus, or of Ray, as is used."""

    def labels(self, **labels: str) -> "Metric":
        """The metric of these labels."""

    def inc(self, amount: float) -> None:
        """Add to a counter."""

    def set(self, value: float) -> None:
        """Set a gauge."""

    def observe(self, amount: float) -> None:
        """Add to a histogram."""


Make = Callable[..., Metric]


_TEXTS = {
    **COUNTERS,
    **MODEL_COUNTERS,
    **SOURCE_COUNTERS,
    **STRENGTH_COUNTERS,
    **ONLINE_GAUGES,
    LOSSLESS: LOSSLESS_TEXT,
    TIMES: TIMES_TEXT,
}


@cache
def _metric(make: Make, name: str, labels: tuple[str, ...]) -> Metric:
    """A metric of this process; engines that come later add to it."""
    more: dict[str, Any] = {}
    if name == TIMES:
        more = {"buckets": [float(bound) for bound in BUCKETS_US]}
    elif name == LOSSLESS or name in ONLINE_GAUGES:
        more = {"multiprocess_mode": "mostrecent"}  # of several API servers, the one told last
    return make(PREFIX + name, _TEXTS[name], list(labels), **more)


def install_stat_logger() -> None:
    """Have ours join the stat loggers of every engine of this process with our methods; once.

    ``vllm.stat_logger_plugins``, vLLM's entry points for such loggers, would do for servers alone,
    and switch statistics on for every engine, ours or not (0.32 ``AsyncLLM.__init__``).
    """
    if not getattr(StatLoggerManager.__init__, _WRAPPED_BY, False):
        StatLoggerManager.__init__ = _joined(StatLoggerManager.__init__)


def _joined(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(
        self: StatLoggerManager,
        vllm_config: "VllmConfig",
        *args: Any,
        client_count: int = 1,
        **kwargs: Any,
    ) -> None:
        from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig

        original(self, vllm_config, *args, client_count=client_count, **kwargs)
        config = vllm_config.speculative_config
        if isinstance(config, SpecExtConfig):
            # First: what is ours must be gone when vLLM's own loggers look.
            self.stat_loggers.insert(0, joining(self, config, client_count))

    setattr(__init__, _WRAPPED_BY, True)
    return __init__


def joining(
    manager: StatLoggerManager, config: "SpecExtConfig", num_front_ends: int
) -> "SpecExtStatLogger":
    """Our logger for this manager; it shows where the manager's Prometheus logger does.

    vLLM adds such a logger where none was given, and Ray's is one, with metrics of its own.

    Args:
        manager: Of a front end.
        config: The engine's.
        num_front_ends: Processes that are told of the engine by turns.
    """
    shown = next(item for item in manager.stat_loggers if isinstance(item, PrometheusStatLogger))
    kinds = (shown._counter_cls, shown._gauge_cls, shown._histogram_cls)
    return SpecExtStatLogger(config, num_front_ends, *kinds)


class SpecExtStatLogger(AggregateStatLoggerBase):
    """Of one front end, for all replicas of its engine."""

    def __init__(
        self,
        config: "SpecExtConfig",
        num_front_ends: int,
        counter: Make,
        gauge: Make,
        histogram: Make,
    ) -> None:
        """Show zeros.

        Args:
            config: The engine's.
            num_front_ends: Processes that are told of it by turns.
            counter: Class of counters.
            gauge: Class of gauges.
            histogram: Class of histograms.
        """
        self._labels = {"method": config.spec_ext.method, "rule": config.rule}
        self._counter, self._gauge, self._histogram = counter, gauge, histogram
        self._lossless, self._is_alone = config.lossless, num_front_ends == 1
        self._online: dict[str, float] = {}
        self._shown: dict[tuple[str, ...], Metric] = {}  # by name and values of labels
        nothing = [0.0] * len(MODEL_COUNTERS)
        zeros = News(
            counts=dict.fromkeys(COUNTERS, 0.0), models=dict.fromkeys(config.reader_names, nothing)
        )
        self._add(zeros)
        self._labelled(self._histogram, TIMES)
        self._show_gauges()

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """After a step: add what a worker sent."""
        news = take_news(scheduler_stats)
        if news is not None:
            self._online = news.get("online", self._online)
            self._add(news)
            self._show_gauges()

    def log(self) -> None:
        """Every few seconds: the version in use grows older, step or not."""
        if self._is_alone:  # else another front end may know of a later version
            self._show_gauges()

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def _add(self, news: News) -> None:
        for name, labels, value in _increments(news):
            self._labelled(self._counter, name, **labels).inc(value)
        for microseconds in news.get("drafter_us", ()):
            self._labelled(self._histogram, TIMES).observe(microseconds)

    def _show_gauges(self) -> None:
        """All of them: Ray forgets a gauge once it has shown it."""
        values = {LOSSLESS: float(self._lossless), **self._online}
        if AGE in values:
            values[AGE] = max(0.0, time.time() - values[AGE])
        for name, value in values.items():
            self._labelled(self._gauge, name).set(value)

    def _labelled(self, make: Make, name: str, **labels: str) -> Metric:
        key = (name, *labels.values())
        if key not in self._shown:
            metric = _metric(make, name, (*self._labels, *labels))
            self._shown[key] = metric.labels(**self._labels, **labels)
        return self._shown[key]


def _increments(news: News) -> Iterator[tuple[str, dict[str, str], float]]:
    """Counter, labels beside method and rule, and what to add."""
    for name, value in news.get("counts", {}).items():
        yield name, {}, value
    for model, values in news.get("models", {}).items():
        for name, value in zip(MODEL_COUNTERS, values, strict=True):
            yield name, {"model": model}, value
    for source, values in news.get("sources", {}).items():
        for name, value in zip(SOURCE_COUNTERS, values, strict=True):
            yield name, {"source": source}, value
    for source, by_strength in news.get("strengths", {}).items():
        for strength, values in by_strength.items():
            for name, value in zip(STRENGTH_COUNTERS, values, strict=True):
                yield name, {"source": source, "strength": strength}, value
