# SPDX-License-Identifier: Apache-2.0
"""Settings that are refused before weights load, told from the settings alone."""

import logging
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.aux_output import AuxOutputConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from vllm_spec_ext.engine.starting import limits
from vllm_spec_ext.engine.starting.limits import (
    refuse_installed_processors,
    refuse_short_prefills,
    refuse_unsupported,
)
from vllm_spec_ext.engine.starting.runners import RunnerChoice
from vllm_spec_ext.errors import UnsupportedError

HERE = str(Path(__file__).parent)  # as the name of a model; vLLM may look others up on the Hub
MODEL: Any = SimpleNamespace(
    runner_type="generate", is_encoder_decoder=False, is_hybrid=False, is_attention_free=False
)
AUX = AuxOutputConfig()
PARALLEL: Any = SimpleNamespace(
    pipeline_parallel_size=1,
    decode_context_parallel_size=1,
    prefill_context_parallel_size=1,
    worker_cls="auto",
)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"kv_offloading_size": 4.0}, r"KV offloading \(--kv-offloading-size\)"),
    ],
)
def test_kv_connectors_are_refused_however_they_are_asked_for(
    settings: dict[str, Any], words: str
) -> None:
    args: Any = SimpleNamespace(aux_output_config=AUX, async_scheduling=None, **settings)
    with pytest.raises(UnsupportedError, match=words):
        refuse_unsupported(args, "input_copy", MODEL, PARALLEL)
    nothing: Any = SimpleNamespace(
        aux_output_config=AUX, async_scheduling=None, **dict.fromkeys(settings)
    )
    refuse_unsupported(nothing, "input_copy", MODEL, PARALLEL)


@pytest.mark.parametrize("name", ["enable_dbo", "enable_batch_sharded_sampling"])
def test_a_step_that_is_divided_is_refused(name: str) -> None:
    args: Any = SimpleNamespace(aux_output_config=AUX, async_scheduling=None)
    parallel: Any = SimpleNamespace(**vars(PARALLEL), **{name: True})
    with pytest.raises(UnsupportedError, match=f"--{name.replace('_', '-')}.*; leave it out"):
        refuse_unsupported(args, "input_copy", MODEL, parallel)


def test_a_model_that_remembers_refused_tokens_is_refused() -> None:
    args: Any = SimpleNamespace(aux_output_config=AUX, async_scheduling=None)
    model: Any = SimpleNamespace(**vars(MODEL), architectures=["LongcatFlashNgramForCausalLM"])
    with pytest.raises(UnsupportedError, match="refused draft tokens included"):
        refuse_unsupported(args, "input_copy", model, PARALLEL)


def test_returned_experts_are_refused_however_they_are_asked_for() -> None:
    args = EngineArgs(model=HERE, enable_return_routed_experts=True)
    with pytest.raises(UnsupportedError, match="--enable-return-routed-experts"):
        refuse_unsupported(args, "auto", MODEL, PARALLEL)
    refuse_unsupported(EngineArgs(model=HERE), "auto", MODEL, PARALLEL)


def test_processors_of_packages_are_not_left_out_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    v1, v2 = RunnerChoice(False, "no GPU"), RunnerChoice(True, "")
    refuse_installed_processors("auto", v1)  # there are none here
    installed = [EntryPoint("no_names", "filters:NoNames", "vllm.logits_processors")]
    monkeypatch.setattr(
        limits, "entry_points", lambda group: [e for e in installed if e.group == group]
    )
    refuse_installed_processors("auto", v2)
    with pytest.raises(UnsupportedError, match=r"found filters:NoNames, .*V1"):
        refuse_installed_processors("auto", v1)


@pytest.mark.parametrize(
    "name", ["max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold"]
)
def test_steps_shorter_than_a_draft_are_refused(name: str) -> None:
    """vLLM 0.32 fills requests with one token to read up, and would wait for ever, or fail."""
    for found in (16, 32):
        with pytest.raises(UnsupportedError, match=f"{name}={found}, expected at least 33"):
            refuse_short_prefills(EngineArgs(model=HERE, **{name: found}), "auto", 32)
    refuse_short_prefills(EngineArgs(model=HERE, **{name: 33}), "auto", 32)
    refuse_short_prefills(EngineArgs(model=HERE), "auto", 32)


@pytest.mark.parametrize("is_server", [False, True])
@pytest.mark.parametrize("is_set", [False, True])
def test_a_front_end_that_goes_around_the_checks_is_told_of(
    is_set: bool,
    is_server: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An offline engine has none."""
    # vLLM's loggers pass nothing on to the root logger, where caplog listens.
    monkeypatch.setattr(limits, "logger", logging.getLogger("limits"))
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", str(int(is_set)))
    model: Any = SimpleNamespace(model="tiny", get_diff_sampling_param=lambda: {"min_p": 0.0})
    args = (AsyncEngineArgs if is_server else EngineArgs)(model=HERE)
    limits.warn_of_requests(args, model)
    told = "options of requests are not checked" in caplog.text
    assert told == (is_set and is_server)
