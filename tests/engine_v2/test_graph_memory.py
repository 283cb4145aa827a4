# SPDX-License-Identifier: Apache-2.0
"""vLLM measures its CUDA graphs on a small KV cache, drops that, and makes the real one.

So on a GPU the cache is made twice, unless its size is given. A CPU has no graphs, and skips it:
here vLLM's own functions are called, in the same order, before the engine answers anything.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from generation import ALWAYS_DRAFT, run, tokens
from save_drafts import save_draft
from scenarios import SCENARIOS
from test_greedy_identity import METHODS, runner_of
from vllm.config.compilation import CUDAGraphMode
from vllm.config.vllm import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.cudagraph_utils import (
    CudaGraphManager,
    _init_minimal_kv_cache_for_profiling,
    _teardown_profiling_state,
)
from worker_counts import kept_counts

from vllm_spec_ext.engine.v2 import full_graphs
from vllm_spec_ext.engine.v2.full_graphs import AnyLengthGraphs, NearbyGraphs

WIDTHS = [[1, 1, 0], [2, 8, 8]]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], type[CudaGraphManager]]] = {
    "trees": (METHODS["oracle_tree"], {}, AnyLengthGraphs),
    "draft_model": ({"method": "small_model", **ALWAYS_DRAFT}, {}, AnyLengthGraphs),
    "on_the_device": (
        {
            "method": "input_copy",
            "num_speculative_tokens": 8,
            "num_speculative_tokens_per_batch_size": WIDTHS,
        },
        {"async_scheduling": True},
        NearbyGraphs,
    ),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What vLLM asks of a device on the way."""
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None)
    # Compiled models alone have graphs of their pieces.
    monkeypatch.setattr(model_runner, "has_compiled_submodule", lambda model: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda: None)
    return monkeypatch


@pytest.mark.parametrize("name", CASES)
def test_the_cache_is_made_twice(
    name: str,
    make_engine: Any,
    expected: Any,
    tiny_model: Path,
    tmp_path: Path,
    as_on_a_gpu: pytest.MonkeyPatch,
) -> None:
    config, more, graphs = CASES[name]
    if config["method"] == "small_model":
        draft = save_draft(tiny_model, tmp_path / "draft", num_hidden_layers=1)
        config = {**config, "model": draft, "num_speculative_tokens": 4}
    engine = make_engine(speculative_config=config, **more)
    runner = runner_of(engine)
    real = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    compilation = runner.vllm_config.compilation_config
    with as_on_a_gpu.context() as patch, set_current_vllm_config(runner.vllm_config):
        group = runner.attn_groups[0][0]
        patch.setattr(
            type(group.get_metadata_builder(0)),
            "get_cudagraph_support",
            lambda *arguments: AttentionCGSupport.ALWAYS,
        )
        patch.setattr(full_graphs, "REPLAYING", (group.backend.get_name(),))
        patch.setattr(compilation, "cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE)
        patch.setattr(compilation, "cudagraph_capture_sizes", [1, 2, 4, 8, 16, 32, 72])
        patch.setattr(compilation, "max_cudagraph_capture_size", 72)
        runner.tree_attention = None  # as at the first time
        _init_minimal_kv_cache_for_profiling(runner)
        assert type(runner.cudagraph_manager) is graphs
        assert runner.tree_attention is None
        assert runner.kv_cache_config.num_blocks < real.num_blocks
        _teardown_profiling_state(runner)
        assert runner.cudagraph_manager is None
        runner.initialize_kv_cache(real)
        assert type(runner.cudagraph_manager) is graphs
    runner.cache_config.num_gpu_blocks = real.num_blocks
    runner.initialize_kv_cache(real)  # without graphs, which a CPU cannot replay
    assert (runner.tree_attention is not None) == (name == "trees")
    scenario = "mixed_lengths"
    truths = [out[0] for out in expected[scenario]] if name == "trees" else None
    counted = kept_counts(runner, as_on_a_gpu)
    assert tokens(run(engine, SCENARIOS[scenario], truths)) == expected[scenario]
    assert counted()["counts"]["accepted_nodes"] > 0
