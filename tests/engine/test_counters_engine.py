# SPDX-License-Identifier: Apache-2.0
"""What an engine's worker counts arrives with vLLM's own statistics, in one process or several."""

from typing import Any

import pytest
from generation import run
from scenarios import PROMPTS, Scenario

SCENARIO = Scenario([{"max_tokens": 40, "ignore_eos": True}], PROMPTS[:3])
COPIES = {"method": "input_copy", "num_speculative_tokens": 6, "adaptive_length": False}
LABELS = {"method": "input_copy", "rule": "exact"}
THEIRS = {
    "verified_drafts": "drafts",
    "verified_nodes": "draft_tokens",
    "accepted_nodes": "accepted_tokens",
}


def ours(name: str) -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(f"spec_ext:{name}", LABELS) or 0.0


def theirs(engine: Any, name: str) -> float:
    values = {metric.name: getattr(metric, "value", 0.0) for metric in engine.get_metrics()}
    return float(values[f"vllm:spec_decode_num_{name}"])


@pytest.mark.parametrize("processes", ["one", "several"])
def test_both_count_the_same(
    processes: str, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if processes == "several":
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        # Of another size than that of other tests: else an engine of this process may be taken.
        engine = make_engine(speculative_config=COPIES, max_num_seqs=3)
    else:
        engine = make_engine(speculative_config=COPIES)
    before = {name: (ours(f"{name}_total"), theirs(engine, THEIRS[name])) for name in THEIRS}
    timed = ours("drafter_microseconds_count")
    run(engine, SCENARIO)
    for name, (our_first, their_first) in before.items():
        grown = ours(f"{name}_total") - our_first
        assert grown == theirs(engine, THEIRS[name]) - their_first, name
        assert grown > 0
    assert ours("drafter_microseconds_count") > timed
    assert ours("lossless") == 1
