# SPDX-License-Identifier: Apache-2.0
"""Acceptance of one request among its metrics."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, RequestStateStats

from vllm_spec_ext.engine.starting.spec_config import MethodSettings, SpecExtConfig
from vllm_spec_ext.engine.watching import served_requests
from vllm_spec_ext.options import MethodOptions


def output(*, finished: bool, counted: bool = True, num_answers: int = 1) -> RequestOutput:
    metrics = RequestSpecDecodeMetrics.new(4)
    metrics.observe(num_draft_tokens=4, num_accepted=3)
    answers = [
        CompletionOutput(i, "", [1], None, None, spec_decode_metrics=metrics if counted else None)
        for i in range(num_answers)
    ]
    stats = RequestStateStats(num_generation_tokens=9, arrival_time=2.5)
    return RequestOutput("a", None, [1], None, answers, finished, metrics=stats)


def test_acceptance_stands_beside_the_other_numbers() -> None:
    found = output(finished=True)
    served_requests.add_acceptance(found)
    assert found.metrics is not None
    values = dataclasses.asdict(found.metrics)
    assert values["num_generation_tokens"] == 9
    assert values["arrival_time"] == 2.5
    assert values["speculative_decoding"]["num_accepted_draft_tokens"] == 3
    assert isinstance(found.metrics, RequestStateStats)


@pytest.mark.parametrize(
    "found", [output(finished=True, counted=False), output(finished=True, num_answers=2)]
)
def test_nothing_is_added_where_nothing_was_counted(found: RequestOutput) -> None:
    served_requests.add_acceptance(found)
    assert type(found.metrics) is RequestStateStats


class Engine:
    """As much of vLLM's as is looked at."""

    def __init__(self, config: object, level: str) -> None:
        self.vllm_config = SimpleNamespace(speculative_config=config)
        self.observability_config = SimpleNamespace(per_request_spec_decode_metrics=level)
        self.closed = False

    async def generate(self, prompt: str) -> AsyncIterator[RequestOutput]:
        try:
            yield output(finished=False)
            yield output(finished=True)
        finally:
            self.closed = True


def ours() -> SpecExtConfig:
    config = object.__new__(SpecExtConfig)
    settings = MethodSettings(method="input_copy", options=MethodOptions())
    config.__dict__.update(spec_ext=settings, draft_models=(), cache_views=())
    return config


@pytest.mark.parametrize(
    ("config", "level", "added"),
    [(ours(), "summary", True), (ours(), "none", False), (None, "summary", False)],
)
def test_streams(config: object, level: str, added: bool) -> None:
    generate: Any = served_requests._watched(Engine.generate)

    async def ask() -> list[bool]:
        engine = Engine(config, level)
        kinds = [type(o.metrics) is not RequestStateStats async for o in generate(engine, "a")]
        assert engine.closed
        other = Engine(config, level)
        stream = generate(other, "a")
        await anext(stream)
        await stream.aclose()  # as when a client goes away
        assert other.closed
        return kinds

    assert asyncio.run(ask()) == [False, added]
