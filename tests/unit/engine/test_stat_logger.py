# SPDX-License-Identifier: Apache-2.0
"""From a worker's answer through vLLM's statistics to Prometheus, or to Ray."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_spec_ext.engine.starting.spec_config import MethodSettings, SpecExtConfig
from vllm_spec_ext.engine.watching import stat_logger
from vllm_spec_ext.engine.watching.counts import News, WorkerCounts
from vllm_spec_ext.engine.watching.metric_names import COUNTERS
from vllm_spec_ext.engine.watching.stat_channel import KEY, put_news, take_news
from vllm_spec_ext.engine.watching.stat_logger import SpecExtStatLogger
from vllm_spec_ext.options import MethodOptions


def ours(method: str = "input_copy", *models: str) -> SpecExtConfig:
    config = object.__new__(SpecExtConfig)
    settings = MethodSettings(method=method, options=MethodOptions())
    names = tuple(SimpleNamespace(name=name) for name in models)
    config.__dict__.update(spec_ext=settings, draft_models=names, cache_views=())
    return config


def shown(name: str, **labels: str) -> float | None:
    """What Prometheus reads."""
    return REGISTRY.get_sample_value(f"spec_ext:{name}", {"rule": "exact", **labels})


def stats_of(news: News) -> SchedulerStats:
    """What vLLM makes of a worker's answer."""
    return SchedulerStats(kv_connector_stats={KEY: news})


# -- the way there --------------------------------------------------------------------------------


def test_news_travel_with_an_answer() -> None:
    counts = WorkerCounts()
    assert put_news(EMPTY_MODEL_RUNNER_OUTPUT, counts) is EMPTY_MODEL_RUNNER_OUTPUT
    counts.add(steps=3)
    counts.time(7)
    assert put_news(None, counts) is None  # the step is not over: they wait
    empty: ModelRunnerOutput = EMPTY_MODEL_RUNNER_OUTPUT
    sent = put_news(empty, counts)
    assert empty.kv_connector_output is None  # one object for all empty answers
    arrived = pickle.loads(pickle.dumps(sent))  # from the worker to the engine
    assert isinstance(arrived, ModelRunnerOutput)
    assert arrived.kv_connector_output is not None
    assert arrived.kv_connector_output.kv_connector_stats is not None
    # As the scheduler does (0.32 make_stats), then to the front end.
    stats = SchedulerStats(kv_connector_stats=arrived.kv_connector_output.kv_connector_stats.data)
    message = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    told = MsgpackDecoder(EngineCoreOutputs).decode(message).scheduler_stats
    assert take_news(told) == {"counts": {"steps": 3.0}, "drafter_us": [7.0]}
    assert told.kv_connector_stats is None  # vLLM's own loggers find nothing there
    assert take_news(told) is None
    assert take_news(None) is None


def test_statistics_of_others_stay() -> None:
    stats = SchedulerStats(kv_connector_stats={"theirs": 1})
    assert take_news(stats) is None
    assert stats.kv_connector_stats == {"theirs": 1}


def test_the_scheduler_hands_them_on() -> None:
    """vLLM's own: no connector is needed for the statistics of one."""
    from vllm.v1.core.sched.scheduler import Scheduler

    counts = WorkerCounts()
    counts.add(steps=3)
    output = put_news(EMPTY_MODEL_RUNNER_OUTPUT, counts)
    assert isinstance(output, ModelRunnerOutput)
    assert output.kv_connector_output is not None
    scheduler = SimpleNamespace(
        connector=None,
        log_stats=True,
        kv_cache_manager=SimpleNamespace(make_prefix_cache_stats=lambda: "", usage=0.0),
        connector_prefix_cache_stats=None,
        kv_metrics_collector=None,
        get_request_counts=lambda: (0, 0),
        deferred_waiting=(),
        _kv_fetch_counts={},
    )
    found = output.kv_connector_output
    Scheduler._update_from_kv_xfer_finished(scheduler, found)
    stats = Scheduler.make_stats(scheduler, kv_connector_stats=found.kv_connector_stats)
    assert take_news(stats) == {"counts": {"steps": 3.0}}


# -- what is shown --------------------------------------------------------------------------------


def prometheus(config: SpecExtConfig, num_front_ends: int = 1) -> SpecExtStatLogger:
    kinds = PrometheusStatLogger
    return SpecExtStatLogger(
        config, num_front_ends, kinds._counter_cls, kinds._gauge_cls, kinds._histogram_cls
    )


def test_what_prometheus_reads() -> None:
    logger = prometheus(ours("adaptive_ngram", "large"))
    assert all(shown(f"{name}_total", method="adaptive_ngram") == 0 for name in COUNTERS)
    assert shown("lossless", method="adaptive_ngram") == 1
    assert shown("drafter_microseconds_count", method="adaptive_ngram") == 0
    assert shown("draft_model_rows_total", method="adaptive_ngram", model="large") == 0
    for replica in (0, 1):  # of one engine
        news: News = {
            "counts": {"steps": 2.0, "emitted_tokens": 7.0},
            "drafter_us": [15.0, 1e9],
            "models": {"large": [1.0, 30.0, 0.5]},
            "sources": {"own text": [4.0, 2.0, 3.0]},
            "strengths": {"own text": {"1 token agrees": [3.0, 1.0, 1.5]}},
        }
        logger.record(stats_of(news), None, engine_idx=replica)
    logger.record(SchedulerStats(), None)
    logger.record(None, None)
    assert shown("steps_total", method="adaptive_ngram") == 4
    assert shown("emitted_tokens_total", method="adaptive_ngram") == 14
    assert shown("drafter_microseconds_bucket", method="adaptive_ngram", le="20.0") == 2
    assert shown("drafter_microseconds_bucket", method="adaptive_ngram", le="+Inf") == 4
    assert shown("drafter_microseconds_sum", method="adaptive_ngram") == pytest.approx(2e9 + 30)
    assert shown("draft_model_rows_total", method="adaptive_ngram", model="large") == 60
    assert shown("draft_model_seconds_total", method="adaptive_ngram", model="large") == 1
    assert shown("source_verified_nodes_total", method="adaptive_ngram", source="own text") == 8
    assert shown("source_accepted_nodes_total", method="adaptive_ngram", source="own text") == 4
    assert shown("source_expected_nodes_total", method="adaptive_ngram", source="own text") == 6
    one = {"method": "adaptive_ngram", "source": "own text", "strength": "1 token agrees"}
    names = [f"strength_{word}_nodes_total" for word in ("verified", "accepted", "expected")]
    assert [shown(name, **one) for name in names] == [6, 2, 3]
    # A later engine of this process adds to them.
    prometheus(ours("adaptive_ngram")).record(stats_of({"counts": {"steps": 1.0}}), None)
    assert shown("steps_total", method="adaptive_ngram") == 5


def test_gauges_of_online_distillation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5000.0
    monkeypatch.setattr(time, "time", lambda: now)
    alone, shared = prometheus(ours("blockwise")), prometheus(ours("recycling"), 2)
    values = {"online_version": 3.0, "online_version_age_seconds": 4990.0}
    for logger in (alone, shared):
        logger.record(stats_of({"online": values}), None)
        logger.record(stats_of({"counts": {"steps": 1.0}}), None)
    assert shown("online_version", method="blockwise") == 3
    assert shown("online_version_age_seconds", method="blockwise") == 10
    assert shown("online_acceptance", method="blockwise") is None  # not known
    now = 5030.0
    for logger in (alone, shared):
        logger.log()  # no step
    assert shown("online_version_age_seconds", method="blockwise") == 40
    # Another API server may have been told of a newer version.
    assert shown("online_version_age_seconds", method="recycling") == 10


API_SERVER = """
import sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from test_stat_logger import ours, prometheus, stats_of
logger = prometheus(ours(), 2)
logger.record(stats_of({"counts": {"steps": float(sys.argv[2])}, "drafter_us": [15.0]}), None)
"""


def test_several_api_servers_add_up(tmp_path: Path) -> None:
    """As vLLM starts them: a folder in which each process keeps its metrics."""
    from prometheus_client import CollectorRegistry, multiprocess

    servers = [
        subprocess.Popen(
            [sys.executable, "-c", API_SERVER, str(Path(__file__).parent), str(steps)],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        )
        for steps in (3, 4)
    ]
    assert [server.wait(timeout=800) for server in servers] == [0, 0]
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    labels = {"method": "input_copy", "rule": "exact"}
    found = registry.get_sample_value
    assert found("spec_ext:steps_total", labels) == 7
    assert found("spec_ext:drafter_microseconds_count", labels) == 2
    assert found("spec_ext:lossless", labels) == 1


# -- among vLLM's loggers -------------------------------------------------------------------------


class Manager:
    """As much of vLLM's as is looked at."""

    def __init__(self, vllm_config: Any, loggers: list[Any], client_count: int = 1) -> None:
        self.stat_loggers = [*loggers]


def test_ours_is_first_and_of_our_engines_alone() -> None:
    join: Any = stat_logger._joined(Manager.__init__)
    theirs = [object(), object.__new__(PrometheusStatLogger)]
    for config, expected in ((None, 2), (ours(), 3)):
        manager = Manager.__new__(Manager)
        join(manager, SimpleNamespace(speculative_config=config), theirs, client_count=2)
        assert len(manager.stat_loggers) == expected
    assert isinstance(manager.stat_loggers[0], SpecExtStatLogger)
    assert not manager.stat_loggers[0]._is_alone


def test_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatLoggerManager, "__init__", Manager.__init__)
    stat_logger.install_stat_logger()
    once: Any = StatLoggerManager.__init__
    stat_logger.install_stat_logger()
    assert StatLoggerManager.__init__ is once is not Manager.__init__


def test_rays_metrics_where_the_engine_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from vllm.v1.metrics import ray_wrappers

    values: dict[str, float] = {}
    made: dict[str, Any] = {}

    class Metric:
        """In the place of one of ``ray.util.metrics``."""

        def __init__(self, name: str, **arguments: Any) -> None:
            self.name, self._tag_keys = name, arguments["tag_keys"]
            made[name] = arguments

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert tags == {"method": "suffix_tree", "rule": "exact", "ReplicaId": ""}
            values[self.name] = values.get(self.name, 0.0) + value

        observe = inc

        def set(self, value: float, tags: dict[str, str]) -> None:
            values[self.name] = value

    kinds = SimpleNamespace(Counter=Metric, Gauge=Metric, Histogram=Metric)
    monkeypatch.setattr(ray_wrappers, "ray_metrics", kinds)
    manager: Any = SimpleNamespace(
        stat_loggers=[object.__new__(ray_wrappers.RayPrometheusStatLogger)]
    )
    logger = stat_logger.joining(manager, ours("suffix_tree"), 1)
    values.clear()  # Ray forgets a gauge once it has shown it
    news: News = {
        "counts": {"steps": 3.0},
        "drafter_us": [15.0, 20.0],
        "online": {"online_version": 2.0},
    }
    for _ in range(2):
        logger.record(stats_of({**news}), None)
    assert values == {
        "spec_ext_steps": 6.0,
        "spec_ext_drafter_microseconds": 70.0,
        "spec_ext_lossless": 1.0,
        "spec_ext_online_version": 2.0,
    }
    assert made["spec_ext_drafter_microseconds"]["boundaries"][:2] == [10.0, 20.0]
