# SPDX-License-Identifier: Apache-2.0
"""vLLM picks its runner as without us; what needs V1 keeps V1, and the start-up line says so."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
from test_greedy_identity import METHODS, runner_of
from tiny_engine import ARGUMENTS
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_spec_ext.engine.starting import runners, scheduling
from vllm_spec_ext.errors import UnsupportedError
from vllm_spec_ext.proposers import registry

V1_ALONE: dict[str, Any] = {"speculative_config": METHODS["oracle"], "enable_lora": True}


def config_of(model: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**{"model": str(model), **ARGUMENTS, **arguments}).create_engine_config()


def ask_for(monkeypatch: pytest.MonkeyPatch, value: bool | None) -> None:
    """What VLLM_USE_V2_MODEL_RUNNER says; vLLM reads its environment once a process."""
    from vllm import envs

    monkeypatch.setitem(vars(envs), runners.ENVIRONMENT, value)


def test_the_default_is_vllms(tiny_model: Path) -> None:
    plain = config_of(tiny_model)
    ours = config_of(tiny_model, speculative_config=METHODS["oracle"])
    assert plain.use_v2_model_runner
    assert ours.use_v2_model_runner
    assert ours.speculative_config.method == "ngram_gpu"
    assert ours.speculative_config.spec_ext.runner == "vLLM's V2 model runner (vLLM's default)"
    assert not ours.scheduler_config.async_scheduling
    assert not ours.num_lookahead_tokens


def test_arguments_of_an_earlier_engine_say_nothing_of_scheduling(tiny_model: Path) -> None:
    """Nor do copies of them, for engines of ours or others."""
    from vllm.engine.arg_utils import EngineArgs

    wanted = {"model": str(tiny_model), **ARGUMENTS, "speculative_config": METHODS["oracle"]}
    args = EngineArgs(**wanted)
    for _ in range(2):
        config = copy.copy(args).create_engine_config()
        config = args.create_engine_config()
        assert args.async_scheduling is None
        assert not config.scheduler_config.async_scheduling
        why = config.speculative_config.spec_ext.synchronous_because
        assert why == "drafts are made behind each step's tokens"
    args.speculative_config = None
    assert args.create_engine_config().scheduler_config.async_scheduling
    asked = EngineArgs(**wanted, async_scheduling=False).create_engine_config()
    assert asked.speculative_config.spec_ext.synchronous_because == "asked for"


def test_v1_is_kept_where_our_part_of_v2_does_not_suffice(tiny_model: Path) -> None:
    config = config_of(tiny_model, **V1_ALONE)
    assert not config.use_v2_model_runner
    assert config.speculative_config.method == "custom_class"
    runner = config.speculative_config.spec_ext.runner
    assert runner == "vLLM's V1 model runner (LoRA in V1 alone)"


def test_the_user_may_ask_for_v1(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for(monkeypatch, False)
    config = config_of(tiny_model, speculative_config=METHODS["oracle"])
    assert not config.use_v2_model_runner
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in config.speculative_config.spec_ext.runner


def test_insisting_on_v2_is_refused_where_v1_is_needed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_for(monkeypatch, True)
    assert config_of(tiny_model, speculative_config=METHODS["oracle"]).use_v2_model_runner
    with pytest.raises(UnsupportedError, match="LoRA"):
        config_of(tiny_model, **V1_ALONE)


def test_without_triton_it_is_v1(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "HAS_TRITON", False)
    config = config_of(tiny_model, speculative_config=METHODS["oracle"])
    assert config.speculative_config.method == "custom_class"
    assert not config.use_v2_model_runner


def test_async_scheduling_is_the_users_and_needs_v2(tiny_model: Path) -> None:
    config = config_of(tiny_model, speculative_config=METHODS["oracle"], async_scheduling=True)
    assert config.scheduler_config.async_scheduling
    with pytest.raises(UnsupportedError, match="async_scheduling forced on"):
        config_of(tiny_model, **V1_ALONE, async_scheduling=True)


def test_the_start_up_line_says_which_runner_runs(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_of(make_engine(speculative_config=METHODS["input_copy"]))
    logger = logging.getLogger("vllm.spec_ext")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm.spec_ext"):
        runner.drafter.load_model(runner.get_model())
    logger.removeHandler(caplog.handler)
    (line,) = {message for message in caplog.messages if "method input_copy" in message}
    assert (
        "on vLLM's V2 model runner (vLLM's default), synchronous scheduling (there is no GPU"
        in line
    )


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({}, None),
        ({"async_scheduling": True}, None),
        ({"async_scheduling": False}, "asked for"),
        ({"speculative_config": METHODS["suffix_tree"]}, "behind each step's tokens"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "scheduler_cls was given"),
        (V1_ALONE, "V1 runner"),
    ],
)
def test_it_says_why_steps_wait_for_each_other(
    engine: dict[str, Any], reason: str | None, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "has_gpu", lambda: True)
    made = config_of(tiny_model, **{"speculative_config": METHODS["input_copy"], **engine})
    assert made.scheduler_config.async_scheduling == (reason is None)
    found = made.speculative_config.spec_ext.synchronous_because
    assert found is None if reason is None else reason in found


def widths_of(made: Any, most: int) -> list[int]:
    """Draft tokens for each number of requests from 0 on; empty without a table."""
    spec = made.speculative_config
    table = spec.num_speculative_tokens_per_batch_size
    if table is None:
        return []
    found: list[int] = build_dynamic_sd_schedule_lookup(table, most, spec.num_speculative_tokens)
    return found


@pytest.mark.parametrize(
    ("config", "late"),
    [
        ({"method": "input_copy"}, True),
        ({"method": "auto"}, True),
        ({"method": "adaptive_ngram", "tree": False}, True),
        ({"method": "adaptive_ngram"}, False),
        ({"method": "auto", "copy_input": False}, False),
        ({"method": "suffix_tree"}, False),
        ({"method": "input_copy", "scorer": {"type": "top_k", "k": 3}, "allow_lossy": True}, False),
    ],
)
def test_on_a_gpu_what_need_not_wait_does_not(
    config: dict[str, Any], late: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not config_of(tiny_model, speculative_config=config).scheduler_config.async_scheduling
    monkeypatch.setattr(scheduling, "has_gpu", lambda: True)
    made = config_of(tiny_model, speculative_config=config)
    assert made.scheduler_config.async_scheduling == late
    spec = made.speculative_config
    default = registry.info(config["method"]).num_speculative_tokens
    assert default is not None
    width = min(default, 8) if late else default
    assert spec.num_speculative_tokens == width
    few = 288 // (width + 1)
    # One request says that there are graphs for plain steps; the scheduler lets it draft.
    assert widths_of(made, 90)[2:] == ([width] * (few - 1) + [0] * (90 - few) if late else [])
    scheduler = made.scheduler_config.scheduler_cls
    assert (scheduler == scheduling.WIDTH_SCHEDULER) == late
    fixed = config_of(tiny_model, speculative_config={**config, "adaptive_length": False})
    assert fixed.scheduler_config.scheduler_cls is None
    assert widths_of(fixed, 90)[1:] == ([width] * few + [0] * (90 - few) if late else [])
    asked = {**config, "num-speculative-tokens": 11}
    made = config_of(tiny_model, speculative_config=asked)
    assert widths_of(made, 90)[2:] == ([11] * 23 + [0] * 66 if late else [])
    table = {**asked, "num-speculative-tokens-per-batch-size": [[1, 4, 11], [5, 9, 3]]}
    made = config_of(tiny_model, speculative_config=table)
    assert widths_of(made, 9)[1:] == [11] * 4 + [3] * 5
    del table["num-speculative-tokens"]
    made = config_of(tiny_model, speculative_config=table, async_scheduling=True)
    assert widths_of(made, 9)[1:] == [min(default, 11)] * 4 + [min(default, 3)] * 5
    made = config_of(tiny_model, speculative_config=asked, async_scheduling=not late)
    assert made.scheduler_config.async_scheduling != late
    assert made.speculative_config.num_speculative_tokens == 11
    made = config_of(tiny_model, speculative_config=config, async_scheduling=not late)
    # Asynchronously all that may be drafted is verified in every step, whoever drafts.
    assert made.speculative_config.num_speculative_tokens == (default if late else min(default, 8))


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"method": "auto"}, {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}),
        ({"method": "adaptive_ngram", "tree": False, "request_buckets": 1 << 13}, {}),
    ],
)
def test_what_an_asynchronous_engine_would_not_do(
    config: dict[str, Any],
    arguments: dict[str, Any],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduling, "has_gpu", lambda: True)
    made = config_of(tiny_model, speculative_config=config, **arguments)
    assert not made.scheduler_config.async_scheduling
    default = registry.info(config["method"]).num_speculative_tokens
    assert made.speculative_config.num_speculative_tokens == default


def test_an_executor_that_cannot_run_ahead(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "has_gpu", lambda: True)
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class StepByStep(UniProcExecutor):
        @classmethod
        def supports_async_scheduling(cls) -> bool:
            return False

    monkeypatch.setattr(Executor, "get_class", staticmethod(lambda config: StepByStep))
    made = config_of(tiny_model, speculative_config={"method": "input_copy"})
    assert not made.scheduler_config.async_scheduling
    assert made.speculative_config.num_speculative_tokens == 32


def test_late_drafts_need_nothing_of_trees(make_engine: Any) -> None:
    config = {"method": "auto", "num_speculative_tokens": 8}
    runner = runner_of(make_engine(speculative_config=config, async_scheduling=True))
    assert runner.late_steps is not None
    assert runner.drafter.scratch_need.most == 0
    assert runner.tree_attention is None
    waiting = runner_of(make_engine(speculative_config=config))
    assert waiting.drafter.scratch_need.most > 0
    assert waiting.tree_attention is not None
