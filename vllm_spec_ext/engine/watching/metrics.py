# SPDX-License-Identifier: Apache-2.0
"""What the front end tells Prometheus about this plugin, beside vLLM's own metrics.

The names do not start with ``vllm:``: vLLM drops every such collector when an engine starts
(v1/metrics/prometheus.py, ``unregister_vllm_metrics``).
"""

import atexit
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm_spec_ext.engine.watching.model_counters import MODEL_COUNTERS, model_readings
from vllm_spec_ext.engine.watching.shared_counters import COUNTERS, CounterReadings
from vllm_spec_ext.engine.watching.source_counters import SOURCE_COUNTERS, source_readings

if TYPE_CHECKING:
    from prometheus_client import Gauge

PREFIX = "spec_ext:"


@cache
def _lossless_gauge() -> "Gauge":
    from prometheus_client import Gauge

    return Gauge(
        f"{PREFIX}lossless",
        "1 if drafts are verified by a rule that leaves the output as the target's own, else 0.",
        labelnames=["method", "rule"],
        multiprocess_mode="mostrecent",
    )


class _Collector:
    """Shows the workers' counters, read when Prometheus asks."""

    def __init__(self) -> None:
        self._folders: dict[tuple[str, str], list[str]] = {}  # by method and rule
        self._models: dict[tuple[str, str, str], list[tuple[str, int]]] = {}  # folder and index

    def watch(self, method: str, rule: str, folder: str, models: Sequence[str] = ()) -> bool:
        """Show this engine's counters, too, and those of its draft models; False if it did so."""
        folders = self._folders.setdefault((method, rule), [])
        if folder in folders:
            return False
        folders.append(folder)
        for index, name in enumerate(models):
            self._models.setdefault((method, rule, name), []).append((folder, index))
        return True

    def collect(self) -> Iterator[Any]:
        """All metrics with their labels; called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        labels = ["method", "rule"]
        counters = {
            name: CounterMetricFamily(f"{PREFIX}{name}", text, labels=labels)
            for name, text in COUNTERS.items()
        }
        times = HistogramMetricFamily(
            f"{PREFIX}drafter_microseconds",
            "Time of the proposer in a step, all requests together.",
            labels=labels,
        )
        for key, folders in self._folders.items():
            readings = CounterReadings(folders)
            for name, family in counters.items():
                family.add_metric(key, readings[name])
            times.add_metric(key, readings.time_buckets, readings.total_time_us)
        yield from counters.values()
        yield times
        families = [
            CounterMetricFamily(f"{PREFIX}{name}", text, labels=[*labels, "model"])
            for name, text in MODEL_COUNTERS.items()
        ]
        for model, places in self._models.items():
            found = [model_readings([folder], index) for folder, index in places]
            for family, values in zip(families, zip(*found, strict=True), strict=True):
                family.add_metric(model, sum(values))
        if self._models:
            yield from families
        by_source = [
            CounterMetricFamily(f"{PREFIX}{name}", text, labels=[*labels, "source"])
            for name, text in SOURCE_COUNTERS.items()
        ]
        for key, folders in self._folders.items():
            for source, counts in source_readings(folders).items():
                for family, value in zip(by_source, counts, strict=True):
                    family.add_metric((*key, source), value)
        yield from (family for family in by_source if family.samples)


@cache
def _collector() -> _Collector:
    from prometheus_client import REGISTRY

    collector = _Collector()
    REGISTRY.register(collector)
    return collector


def publish(method: str, rule: str, folder: str, models: Sequence[str] = ()) -> None:
    """Say which acceptance rule this process's engine runs, and show what its workers count.

    Args:
        method: Name of the proposer.
        rule: ``"exact"``, or the relaxed rule with its parameters.
        folder: Where the workers count; removed when this process ends.
        models: Names of the draft models.
    """
    _lossless_gauge().labels(method=method, rule=rule).set(rule == "exact")
    if _collector().watch(method, rule, folder, models):
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
