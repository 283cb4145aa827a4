# SPDX-License-Identifier: Apache-2.0
"""What ``scripts/host_work.py`` counts as our own time in a step."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from generation import run, sampling_params, tokens
from scenarios import PROMPTS, Scenario
from test_greedy_identity import runner_of

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "host_work.py"
NUM_TOKENS = 50


@pytest.fixture(scope="module")
def host_work() -> ModuleType:
    spec = importlib.util.spec_from_file_location("host_work", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    __import__("sys").modules["host_work"] = module  # for its dataclass
    spec.loader.exec_module(module)
    return module


def test_an_inner_stage_is_no_part_of_the_outer_one(host_work: ModuleType) -> None:
    now = [0.0]
    stages = host_work.Stages(clock=lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    propose, theirs = stages.timed("propose", wait), stages.timed(host_work.THEIRS, wait)

    def draft() -> None:
        wait(1.0)
        propose(2.0)
        theirs(4.0)
        wait(8.0)

    stages.timed("draft", draft)()
    assert stages.take() == {
        "prepare": 0.0,
        "verify": 0.0,
        "commit": 0.0,
        "draft": 9000.0,
        "copies": 0.0,
        "propose": 2000.0,
    }
    assert stages.take()["draft"] == 0.0


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_every_stage_of_a_step_is_timed(
    shape: str, host_work: ModuleType, plain: Any, make_engine: Any
) -> None:
    scenario = Scenario([{"max_tokens": NUM_TOKENS, "ignore_eos": True}], PROMPTS[:3])
    answers = [completions[0] for completions in tokens(run(plain, scenario))]
    engine = make_engine(speculative_config=host_work.config_of(shape))
    before = type(runner_of(engine)).sample_tokens
    params = [sampling_params(scenario.params[0], {"truth": truth}) for truth in answers]
    steps = host_work.measure(engine, scenario.prompts, params)
    assert 5 < len(steps) < NUM_TOKENS - 10, "a part of each draft is right"
    found = host_work.medians(steps, on_cpu=True)
    for stage in ("prepare", "verify", "draft", "propose"):
        assert found[stage] > 0, stage
    assert max(step["commit"] for step in steps) > 0
    assert found["ours"] > found["verify"]
    if shape == "tree":
        assert found["copies"] > 0
        assert host_work.medians(steps, on_cpu=False)["ours"] > found["ours"]
    assert type(runner_of(engine)).sample_tokens is before, "nothing of it stays"
    assert shape in host_work.table({shape: {"3": found}})
