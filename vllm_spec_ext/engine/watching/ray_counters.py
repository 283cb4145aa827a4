# SPDX-License-Identifier: Apache-2.0
"""What the workers count, through Ray's metrics, where an engine's own metrics go there.

Ray Serve and Ray Data give an engine vLLM's ``RayPrometheusStatLogger``. There is no ``/metrics``
page of a server then, but one for each node of the cluster. So ours joins the engine's stat
loggers, and hands on what has been counted since the last time.
"""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_spec_ext.engine.watching.metrics import PREFIX
from vllm_spec_ext.engine.watching.model_counters import MODEL_COUNTERS, model_readings
from vllm_spec_ext.engine.watching.shared_counters import COUNTERS, CounterReadings

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig

_RAY_LOGGERS = "vllm.v1.metrics.ray_wrappers"
_INTERVAL_S = 0.5


def count_in_ray(engine: "AsyncLLM", config: "SpecExtConfig") -> None:
    """Join the stat loggers of an engine whose metrics go to Ray; idempotent.

    Args:
        engine: Of a front end that asked for one of our methods.
        config: The engine's.
    """
    loaded, manager = sys.modules.get(_RAY_LOGGERS), engine.logger_manager
    if loaded is None or manager is None:
        return
    loggers = manager.stat_loggers
    to_ray = any(isinstance(logger, loaded.RayPrometheusStatLogger) for logger in loggers)
    if to_ray and not any(isinstance(logger, RayCounters) for logger in loggers):
        loggers.append(RayCounters(config))


class RayCounters(AggregateStatLoggerBase):
    """One of an engine's stat loggers."""

    def __init__(self, config: "SpecExtConfig") -> None:
        """Declare the metrics to Ray, which is imported here.

        Args:
            config: Of the engine; its workers count on this machine.
        """
        from vllm.v1.metrics.ray_wrappers import RayCounterWrapper, RayGaugeWrapper

        labels = {"method": config.spec_ext.method, "rule": config.rule}
        self._folder = config.spec_ext.counter_folder
        self._models = config.reader_names
        gauge = RayGaugeWrapper(f"{PREFIX}lossless", "1 if lossless, else 0.", list(labels))
        self._gauge = gauge.labels(**labels)
        self._lossless = config.lossless
        self._counters: dict[tuple[str, str], RayCounterWrapper] = {}
        for name, text in COUNTERS.items():
            counter = RayCounterWrapper(PREFIX + name, text, list(labels))
            self._counters[name, ""] = counter.labels(**labels)
        for name, text in MODEL_COUNTERS.items() if self._models else ():
            counter = RayCounterWrapper(PREFIX + name, text, [*labels, "model"])
            for model in self._models:
                self._counters[name, model] = counter.labels(**labels, model=model)
        self._told = dict.fromkeys(self._counters, 0.0)
        self._next_s = 0.0

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """After a step: hand on what is new, twice a second and when the engine falls idle."""
        now = time.monotonic()
        idle = scheduler_stats is not None and not scheduler_stats.num_running_reqs
        if now < self._next_s and not idle:
            return
        self._next_s = now + _INTERVAL_S
        self._gauge.set(self._lossless)  # Ray forgets a gauge once it has shown it
        for key, value in self._readings():
            self._counters[key].inc(value - self._told[key])
            self._told[key] = value

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def _readings(self) -> Iterator[tuple[tuple[str, str], float]]:
        if self._folder is None:
            return
        readings = CounterReadings([self._folder])
        yield from (((name, ""), readings[name]) for name in COUNTERS)
        for index, model in enumerate(self._models):
            values = model_readings([self._folder], index)
            yield from (((name, model), v) for name, v in zip(MODEL_COUNTERS, values, strict=True))
