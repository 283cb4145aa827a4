# SPDX-License-Identifier: Apache-2.0
"""Settings that are refused before weights load, told from the settings alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spec_ext.engine.starting.limits import refuse_unsupported
from vllm_spec_ext.errors import UnsupportedError

MODEL: Any = SimpleNamespace(
    runner_type="generate", is_encoder_decoder=False, is_hybrid=False, is_attention_free=False
)
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
    args: Any = SimpleNamespace(async_scheduling=None, **settings)
    with pytest.raises(UnsupportedError, match=words):
        refuse_unsupported(args, "input_copy", MODEL, PARALLEL)
    nothing: Any = SimpleNamespace(async_scheduling=None, **dict.fromkeys(settings))
    refuse_unsupported(nothing, "input_copy", MODEL, PARALLEL)


@pytest.mark.parametrize("name", ["enable_dbo", "enable_batch_sharded_sampling"])
def test_a_step_that_is_divided_is_refused(name: str) -> None:
    args: Any = SimpleNamespace(async_scheduling=None)
    parallel: Any = SimpleNamespace(**vars(PARALLEL), **{name: True})
    with pytest.raises(UnsupportedError, match=f"--{name.replace('_', '-')}.*; leave it out"):
        refuse_unsupported(args, "input_copy", MODEL, parallel)
