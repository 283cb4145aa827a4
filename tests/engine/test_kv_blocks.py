# SPDX-License-Identifier: Apache-2.0
"""On a CPU engines whose drafts need scratch blocks have small KV blocks, others those of vLLM."""

import os
from typing import Any

import pytest
import vllm
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="other platforms have smaller blocks"
)

TREE = {"method": "auto", "num_speculative_tokens": 4}
CHAIN = {"method": "input_copy"}


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        pytest.param(TREE, None, 32, id="a tree"),
        pytest.param(TREE, 128, 128, id="a tree, but the user has a wish"),
        pytest.param(CHAIN, None, 128, id="a chain"),
        pytest.param(None, None, 128, id="plain decoding"),
    ],
)
def test_size_of_blocks(
    method: dict[str, Any] | None, given: int | None, expected: int, make_engine: Any
) -> None:
    engine = make_engine(speculative_config=method, block_size=given)
    core = engine.llm_engine.engine_core.engine_core
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    (group,) = core.scheduler.kv_cache_config.kv_cache_groups
    assert group.kv_cache_spec.block_size == expected
    assert core.scheduler.block_size == expected
    if hasattr(runner, "block_tables"):  # V2
        assert list(runner.block_tables.block_sizes) == [expected]
    else:
        assert runner.input_batch.block_table[0].block_size == expected
    assert core.vllm_config.cache_config.block_size == expected


def test_the_vllm_that_was_asked_for_runs() -> None:
    assert vllm.__version__.startswith(os.environ.get("SPEC_EXT_NEXT_VLLM", "0.32"))
