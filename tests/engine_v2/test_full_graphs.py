# SPDX-License-Identifier: Apache-2.0
"""Which CUDA graph a step gets; a CPU has none, so here is only what vLLM would choose."""

from collections.abc import Iterator
from typing import Any

import pytest
from test_greedy_identity import METHODS, runner_of
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_spec_ext.engine.v2 import full_graphs
from vllm_spec_ext.engine.v2.full_graphs import AnyLengthGraphs, NearbyGraphs, take_any_length

SIZES = [1, 2, 4, 8, 16, 32, 72]
MOST_REQUESTS = 8


@pytest.fixture
def runner(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of an engine that drafts up to 8 tokens, as if on a GPU with vLLM's default graphs."""
    runner = runner_of(make_engine(speculative_config=METHODS["oracle_tree"]))
    assert type(runner.cudagraph_manager) is ModelCudaGraphManager  # without graphs vLLM's stays
    config = runner.vllm_config.compilation_config
    monkeypatch.setattr(config, "cudagraph_capture_sizes", SIZES)
    monkeypatch.setattr(config, "max_cudagraph_capture_size", SIZES[-1])
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None)
    group = runner.attn_groups[0][0]
    monkeypatch.setattr(full_graphs, "REPLAYING", (group.backend.get_name(),))
    monkeypatch.setattr(
        type(group.get_metadata_builder(0)),
        "get_cudagraph_support",
        lambda *arguments: AttentionCGSupport.ALWAYS,
    )
    monkeypatch.setattr(runner, "cudagraph_manager", manager(runner))
    kind = type(runner.model_state)
    yield runner
    runner.model_state.__class__ = kind
    runner.tree_attention.end_step()


def manager(runner: Any, mode: str = "FULL_AND_PIECEWISE") -> ModelCudaGraphManager:
    """As vLLM makes it."""
    return ModelCudaGraphManager(runner.vllm_config, runner.device, CUDAGraphMode[mode], 9)


def graph_of(manager: Any, lengths: list[int], *, prefill: bool = False) -> str:
    """The mode that a step of requests with so many tokens gets."""
    manager._graphs_captured = True
    longest = None if prefill else max(lengths)
    uniform = lengths[0] if len(set(lengths)) == 1 and not prefill else None
    return manager.dispatch(len(lengths), sum(lengths), uniform, 0, longest).cg_mode.name


def test_steps_of_any_lengths_get_a_full_graph(runner: Any) -> None:
    steps = ([1], [1, 1, 1], [4], [1, 9, 3])
    vllm_takes = [graph_of(runner.cudagraph_manager, step) for step in steps]
    assert vllm_takes == ["PIECEWISE"] * 4
    take_any_length(runner)
    assert isinstance(runner.cudagraph_manager, AnyLengthGraphs)
    assert [graph_of(runner.cudagraph_manager, step) for step in steps] == ["FULL"] * 4
    assert graph_of(runner.cudagraph_manager, [9] * MOST_REQUESTS) == "FULL"


def test_prompts_and_branches_get_none(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_length(runner)
    assert graph_of(runner.cudagraph_manager, [1, 5], prefill=True) == "PIECEWISE"
    assert graph_of(runner.cudagraph_manager, [1, 20]) == "PIECEWISE"  # longer than a draft
    monkeypatch.setattr(runner.tree_attention, "plan", object())
    assert graph_of(runner.cudagraph_manager, [1, 5]) == "PIECEWISE"
    assert graph_of(runner.cudagraph_manager, [9]) == "PIECEWISE"


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "NONE"])
def test_other_modes_are_vllms(mode: str, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = manager(runner, mode)
    monkeypatch.setattr(runner, "cudagraph_manager", made)
    take_any_length(runner)
    assert runner.cudagraph_manager is made


@pytest.mark.parametrize("ours", [True, False])
def test_attention_must_replay_them(
    ours: bool, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what vLLM says of a backend, and by what was seen of it."""
    if ours:
        monkeypatch.setattr(full_graphs, "REPLAYING", ("TRITON_ATTN",))
    else:
        monkeypatch.setattr(
            type(runner.attn_groups[0][0].get_metadata_builder(0)),
            "get_cudagraph_support",
            lambda *arguments: AttentionCGSupport.UNIFORM_BATCH,
        )
    made = runner.cudagraph_manager
    take_any_length(runner)
    assert runner.cudagraph_manager is made


def test_asynchronous_steps_are_of_one_length(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner.cudagraph_manager
    monkeypatch.setattr(runner, "is_async", True)
    take_any_length(runner)
    assert runner.cudagraph_manager is made


def test_a_larger_graph_of_the_right_length_is_taken(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests verify two draft tokens or none, by the step."""
    monkeypatch.setattr(runner, "is_async", True)
    spec = runner.vllm_config.speculative_config
    monkeypatch.setattr(spec, "num_speculative_tokens_per_batch_size", [(1, 1, 0), (2, 8, 2)])
    monkeypatch.setattr(spec, "num_speculative_tokens", 2)
    config = runner.vllm_config.compilation_config
    monkeypatch.setattr(config, "cudagraph_capture_sizes", [1, 2, 4, 8, 16, 24])
    made = ModelCudaGraphManager(
        runner.vllm_config, runner.device, CUDAGraphMode.FULL_AND_PIECEWISE, 3
    )
    monkeypatch.setattr(runner, "cudagraph_manager", made)
    steps = [[length] * number for length in (1, 3) for number in range(1, MOST_REQUESTS + 1)]
    assert graph_of(made, [1] * 5) == "PIECEWISE"
    take_any_length(runner)
    assert isinstance(runner.cudagraph_manager, NearbyGraphs)
    assert [graph_of(runner.cudagraph_manager, step) for step in steps] == ["FULL"] * len(steps)
    for step in steps:
        uniform, number = step[0], len(step)
        found = runner.cudagraph_manager.dispatch(number, sum(step), uniform, 0, uniform)
        assert found.uniform_token_count == uniform
        assert found.num_reqs >= number
        assert found.num_tokens >= sum(step)
    assert graph_of(runner.cudagraph_manager, [1, 5], prefill=True) == "PIECEWISE"


def test_the_fullest_steps_have_graphs_too(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every batch drafts vLLM takes one request for the most that decode plainly."""
    monkeypatch.setattr(runner, "is_async", True)
    spec = runner.vllm_config.speculative_config
    monkeypatch.setattr(spec, "num_speculative_tokens_per_batch_size", [(1, 1, 0), (2, 8, 8)])
    monkeypatch.setattr(spec, "num_speculative_tokens", 8)
    sizes = [1, 2, 4, 36, 72]
    config = runner.vllm_config.compilation_config
    monkeypatch.setattr(config, "cudagraph_capture_sizes", sizes)
    made = manager(runner)
    monkeypatch.setattr(runner, "cudagraph_manager", made)
    assert graph_of(made, [1] * MOST_REQUESTS) == "PIECEWISE"
    take_any_length(runner)
    steps = [[length] * number for length in (1, 9) for number in range(1, MOST_REQUESTS + 1)]
    found = [graph_of(runner.cudagraph_manager, step) for step in steps]
    assert found == ["FULL"] * len(steps)
    assert config.cudagraph_capture_sizes is sizes


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_full_graph_gets_the_length_that_it_was_captured_for(mode: str, runner: Any) -> None:
    """A backend may plan for the longest request, as FlashAttention 3 does."""
    take_any_length(runner)
    runner.cudagraph_manager = manager(runner)  # the first ones were made to measure their memory
    take_any_length(runner)
    batch = InputBatch.make_dummy(2, 4, runner.input_buffers)
    assert batch.max_query_len is None
    seen: list[int] = []
    group = runner.attn_groups[0][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            group, "build_metadata", lambda common, *args, **more: seen.append(common.max_query_len)
        )
        runner.model_state.prepare_attn(
            batch,
            CUDAGraphMode[mode],
            *runner.prepare_attn(batch),
            runner.attn_groups,
            runner.kv_cache_config,
        )
    assert seen == [9 if mode == "FULL" else 2]
    assert batch.max_query_len is None
