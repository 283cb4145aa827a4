# SPDX-License-Identifier: Apache-2.0
"""From the worker's counters to what Prometheus reads."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, generate_latest

from vllm_spec_ext.engine.drafting.drafter import Drafter
from vllm_spec_ext.engine.watching.metrics import _Collector
from vllm_spec_ext.engine.watching.model_counters import ModelCounterWriter
from vllm_spec_ext.engine.watching.shared_counters import BUCKETS_US, CounterReadings, CounterWriter
from vllm_spec_ext.engine.watching.source_counters import SourceCounterWriter, source_readings
from vllm_spec_ext.proposers.base import (
    Draft,
    RequestStep,
    StepContext,
    StepOutcome,
)


def test_counts_of_all_ranks_add_up(tmp_path: Path) -> None:
    one, two = CounterWriter(str(tmp_path), 0), CounterWriter(str(tmp_path), 1)
    one.add(steps=2, emitted_tokens=5)
    one.add(steps=1)
    two.add(steps=10, accepted_nodes=4)
    for microseconds in (1, 10, 10.5, 49, 1e9):
        one.time(microseconds)
    found = CounterReadings([str(tmp_path)])
    assert (found["steps"], found["emitted_tokens"], found["accepted_nodes"]) == (13, 5, 4)
    assert found["empty_drafts"] == 0
    buckets = dict(found.time_buckets)
    assert list(buckets) == [*(str(float(bound)) for bound in BUCKETS_US), "+Inf"]
    assert [buckets[bound] for bound in ("10.0", "20.0", "50.0", "50000.0", "+Inf")] == [
        2,
        3,
        4,
        4,
        5,
    ]
    assert found.total_time_us == pytest.approx(1e9 + 70.5)


def test_the_worker_makes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "counters"
    assert CounterReadings([str(folder)])["steps"] == 0  # the front end may look before
    CounterWriter(str(folder), 0).add(steps=1)
    assert CounterReadings([str(folder)])["steps"] == 1
    assert folder.stat().st_mode & 0o77 == 0


def test_a_worker_without_a_folder_counts_for_itself(tmp_path: Path) -> None:
    for folder in (None, str(tmp_path / "not" / "here")):
        CounterWriter(folder, 0).add(steps=1)
    assert list(tmp_path.iterdir()) == []


def test_half_written_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "0.counters").write_bytes(b"\0" * 24)
    assert CounterReadings([str(tmp_path)])["steps"] == 0


def test_what_prometheus_reads(tmp_path: Path) -> None:
    writer = CounterWriter(str(tmp_path), 0)
    writer.add(steps=3, emitted_tokens=7)
    writer.time(15)
    collector, registry = _Collector(), CollectorRegistry()
    registry.register(collector)
    collector.watch("input_copy", "exact", str(tmp_path))
    text = generate_latest(registry).decode()
    labels = '{method="input_copy",rule="exact"}'
    assert f"spec_ext:steps_total{labels} 3.0" in text
    assert f"spec_ext:emitted_tokens_total{labels} 7.0" in text
    assert 'spec_ext:drafter_microseconds_bucket{le="20.0",method="input_copy"' in text
    assert f"spec_ext:drafter_microseconds_sum{labels} 15.0" in text


def test_draft_models_are_shown_by_name(tmp_path: Path) -> None:
    for replica, rows in ((0, 30), (1, 12)):
        for index in (0, 1):
            writer = ModelCounterWriter(str(tmp_path), replica, index)
            writer.show(forwards=index, rows=1, seconds=9.0)
            writer.show(forwards=2 + index, rows=rows, seconds=0.5)
    ModelCounterWriter(None, 0, 0).show(1, 1, 1.0)
    collector, registry = _Collector(), CollectorRegistry()
    registry.register(collector)
    assert "draft_model" not in generate_latest(registry).decode()
    assert collector.watch("token_tree", "exact", str(tmp_path), ["small", "large"])
    assert not collector.watch("token_tree", "exact", str(tmp_path), ["small", "large"])
    text = generate_latest(registry).decode()
    labels = '{method="token_tree",model="large",rule="exact"}'
    assert f"spec_ext:draft_model_forwards_total{labels} 6.0" in text
    assert f"spec_ext:draft_model_rows_total{labels} 42.0" in text
    assert f"spec_ext:draft_model_seconds_total{labels} 1.0" in text
    assert 'forwards_total{method="token_tree",model="small",rule="exact"} 4.0' in text
    assert CounterReadings([str(tmp_path)])["steps"] == 0


def test_each_source_is_counted_by_name(tmp_path: Path) -> None:
    draft = Draft(
        np.array([1, 2, 3], np.int32),
        sources=(("own text", "recycled"), ("recycled",), ("a.b/c",)),
    )
    for replica in (0, 1):
        writer = SourceCounterWriter(str(tmp_path), replica)
        writer.drafted(StepContext([_step(1, 1)]), [draft])
        writer.verified([StepOutcome("a", 2, 1)])  # the third node was cut off
        writer.verified([StepOutcome("a", 2, 2)])  # of a draft that is not known
        writer.drafted(StepContext([_step(1, 1)]), [draft])
        writer.forget(["a", "unknown"])
        writer.verified([StepOutcome("a", 3, 3)])
        writer.drafted(StepContext([_step(1, 1)]), [draft])
        writer.verified([StepOutcome("a", 3, 0)])
    assert source_readings([str(tmp_path)]) == {
        "a.b/c": [2.0, 0.0],
        "own text": [4.0, 2.0],
        "recycled": [8.0, 2.0],
    }
    collector, registry = _Collector(), CollectorRegistry()
    registry.register(collector)
    collector.watch("auto", "exact", str(tmp_path))
    text = generate_latest(registry).decode()
    assert 'source_accepted_nodes_total{method="auto",rule="exact",source="own text"} 2.0' in text


def _step(num_new: int, num_output: int) -> RequestStep:
    tokens = np.arange(5 + num_output, dtype=np.int32)
    return RequestStep("a", tokens, 5, [1] * num_new, room=4)


def test_a_step_is_empty_if_it_had_no_draft_to_judge(tmp_path: Path) -> None:
    drafter = Drafter.__new__(Drafter)
    drafter._counters = CounterWriter(str(tmp_path), 0)
    accepted = [StepOutcome("a", 4, 3)]
    played: list[tuple[RequestStep, list[StepOutcome]]] = [
        (_step(1, 1), []),  # the prefill's
        (_step(4, 5), accepted),
        (_step(4, 9), accepted),
        (_step(1, 10), []),  # the last: nothing was drafted for it, nor after it
    ]
    for step, outcomes in played[:3]:
        drafter._count(StepContext([step]), outcomes, 0)
    found = CounterReadings([str(tmp_path)])
    assert (found["steps"], found["verified_drafts"], found["empty_drafts"]) == (2, 2, 0)
    step, outcomes = played[3]
    drafter._count(StepContext([step]), outcomes, 0)
    found = CounterReadings([str(tmp_path)])
    assert (found["steps"], found["verified_drafts"], found["empty_drafts"]) == (3, 2, 1)
    assert 1 + found["accepted_nodes"] / found["verified_drafts"] == 4.0
