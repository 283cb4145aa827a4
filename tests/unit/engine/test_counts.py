# SPDX-License-Identifier: Apache-2.0
"""What a worker counts between two answers."""

import math

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_spec_ext.engine.drafting.drafter import Drafter
from vllm_spec_ext.engine.watching.counts import WorkerCounts
from vllm_spec_ext.engine.watching.metric_names import MOST_STRENGTHS, ONLINE_GAUGES
from vllm_spec_ext.engine.watching.source_counters import SourceCounter
from vllm_spec_ext.proposers.base import Draft, RequestStep, StepOutcome


def test_only_what_is_new_is_told() -> None:
    counts = WorkerCounts()
    assert counts.take() == {}
    counts.add(steps=2, emitted_tokens=5, empty_drafts=0)
    counts.add(steps=np.float64(1))
    counts.time(12.5)
    counts.time(np.float64(3.0))
    counts.model("small", 2, 30, 0.5)
    news = counts.take()
    assert news == {
        "counts": {"steps": 3.0, "emitted_tokens": 5.0},
        "drafter_us": [12.5, 3.0],
        "models": {"small": [2.0, 30.0, 0.5]},
    }
    # msgpack carries Python's own numbers alone.
    assert type(news["counts"]["steps"]) is float
    assert type(news["drafter_us"][1]) is float
    counts.add(steps=0)
    assert counts.take() == {}
    counts.model("small", 3, 34, 0.75)  # totals
    counts.model("large", 1, 1, 0.125)
    counts.model("large", 2, 3, 0.25)
    assert counts.take() == {"models": {"small": [1.0, 4.0, 0.25], "large": [2.0, 3.0, 0.25]}}
    with pytest.raises(KeyError):
        counts.add(stepps=1)


def test_gauges_that_are_known() -> None:
    counts, nan = WorkerCounts(), math.nan
    counts.online([1.0] * len(ONLINE_GAUGES))
    counts.online([3.0, 1000.5, 1.25, 1.0, nan, nan, 0.1, 512.0, 7.0])
    found = counts.take()["online"]
    assert (found["online_version"], found["online_version_age_seconds"]) == (3.0, 1000.5)
    assert "online_acceptance_before" not in found
    assert found["online_lost_positions"] == 7.0


def test_each_source_is_counted_by_name() -> None:
    draft = Draft(
        np.array([1, 2, 3], np.int32),
        sources=(("own text", "recycled"), ("recycled",), ("a.b/c",)),
        path_probs=np.array([0.5, 0.25, 0.125], np.float32),
    )
    counts = WorkerCounts()
    sources = SourceCounter(counts)
    sources.drafted([_step(1, 1)], [draft])
    sources.verified([StepOutcome("a", 2, 1)])  # the third node was cut off
    sources.verified([StepOutcome("a", 2, 2)])  # of a draft that is not known
    sources.drafted([_step(1, 1)], [draft])
    sources.forget(["a", "unknown"])
    sources.verified([StepOutcome("a", 3, 3)])
    sources.drafted([_step(1, 1)], [draft])
    sources.verified([StepOutcome("a", 3, 0)])
    news = counts.take()
    assert news["sources"] == {
        "a.b/c": [1.0, 0.0, 0.125],
        "own text": [2.0, 1.0, 1.0],
        "recycled": [4.0, 1.0, 1.5],
    }
    assert news["counts"] == {"expected_nodes": 0.75 + 0.875}


def test_strengths_are_counted_by_source_and_are_few() -> None:
    counts = WorkerCounts()
    sources = SourceCounter(counts)
    draft = Draft(
        np.array([1, 2, 3], np.int32),
        sources=(("copy", "recycled"), ("recycled",), ("copy",)),
        strengths=(("likely", "likely"), ("unlikely",), ("likely",)),
        path_probs=np.array([0.5, 0.25, 0.125], np.float32),
    )
    sources.drafted([_step(1, 1)], [draft])
    sources.verified([StepOutcome("a", 3, 1)])
    assert counts.take()["strengths"] == {
        "copy": {"likely": [2.0, 1.0, 0.625]},
        "recycled": {"likely": [1.0, 1.0, 0.5], "unlikely": [1.0, 0.0, 0.25]},
    }
    for number in range(2 * MOST_STRENGTHS):  # a method that invents them
        one = Draft(np.array([1], np.int32), sources=(("copy",),), strengths=((f"{number}",),))
        sources.drafted([_step(1, 1)], [one])
        sources.verified([StepOutcome("a", 1, 1)])
    news = counts.take()
    assert news["sources"]["copy"][0] == 2 * MOST_STRENGTHS
    assert len(news["strengths"]["copy"]) == MOST_STRENGTHS - 3


def test_a_method_of_one_source_says_what_it_expects() -> None:
    counts = WorkerCounts()
    sources = SourceCounter(counts)
    draft = Draft(np.array([1, 2], np.int32), path_probs=np.array([0.5, 0.25], np.float32))
    sources.drafted([_step(1, 1)], [draft])
    sources.verified([StepOutcome("a", 2, 2)])
    assert counts.take() == {"counts": {"expected_nodes": 0.75}}
    sources.drafted([_step(1, 1)], [Draft(draft.tokens)])
    sources.verified([StepOutcome("a", 2, 2)])
    assert counts.take() == {}  # it gave no probabilities


def _step(num_new: int, num_output: int) -> RequestStep:
    tokens = np.arange(5 + num_output, dtype=np.int32)
    return RequestStep("a", tokens, 5, [1] * num_new, room=4)


def test_a_step_is_empty_if_it_had_no_draft_to_judge() -> None:
    drafter = Drafter.__new__(Drafter)
    drafter.counts = WorkerCounts()
    accepted = [StepOutcome("a", 4, 3)]
    played: list[tuple[RequestStep, list[StepOutcome]]] = [
        (_step(1, 1), []),  # the prefill's
        (_step(4, 5), accepted),
        (_step(4, 9), accepted),
        (_step(1, 10), []),  # the last: nothing was drafted for it, nor after it
    ]
    for step, outcomes in played[:3]:
        drafter._count([step], outcomes, 0)
    found = drafter.counts.take()["counts"]
    assert (found["steps"], found["verified_drafts"]) == (2, 2)
    assert "empty_drafts" not in found
    assert 1 + found["accepted_nodes"] / found["verified_drafts"] == 4.0
    step, outcomes = played[3]
    drafter._count([step], outcomes, 0)
    found = drafter.counts.take()["counts"]
    assert found == {"steps": 1.0, "emitted_tokens": 1.0, "empty_drafts": 1.0}
