# SPDX-License-Identifier: Apache-2.0
"""The contract between draft trees and vLLM's GPU attention backends, as far as no GPU is needed.

Their metadata builders are the real ones, built on CPU tensors; the kernels are not run here.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_greedy_identity import runner_of

from vllm_spec_ext.engine.trees.attention import (
    BACKENDS,
    TreeAttention,
    expand_attention,
    unsupported_reason,
)
from vllm_spec_ext.engine.trees.plan import RequestRows, TreePlan, build_plan

BLOCK = 16
GPU_BACKENDS = [name for name in BACKENDS if name != "CPU_ATTN"]
STAR = [-1] * 12  # twelve branches of one node: more virtual requests than the engine has requests


@pytest.fixture(scope="module")
def runner(make_engine: Any) -> Any:
    """A runner whose configuration the builders are made from; it knows 8 requests at most."""
    return runner_of(make_engine())


def backend_class(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name].get_class()


def build_group(runner: Any, name: str) -> Any:
    """An attention group of the runner's layers with a builder of this backend."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.utils import AttentionGroup

    stock = runner.attn_groups[0][0]
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    group = AttentionGroup(backend_class(name), stock.layer_names, spec, kv_cache_group_id=0)
    builder = group.backend.get_builder_cls()(
        spec, stock.layer_names, runner.vllm_config, torch.device("cpu")
    )
    group.metadata_builders = [builder]
    return group


def batch_of_a_tree_and_a_prefill() -> tuple[Any, TreePlan]:
    """vLLM's metadata of a step with both, and the plan of its tree."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    requests = [RequestRows(0, 13, 20, STAR), RequestRows(13, 5, 0)]
    table = np.arange(2 * 4, dtype=np.int32).reshape(2, 4)
    plan = build_plan(requests, table, BLOCK, list(range(100, 164)))
    starts = torch.tensor([0, 13, 18], dtype=torch.int32)
    lengths = torch.tensor([33, 5], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=2,
        num_actual_tokens=18,
        max_query_len=13,
        max_seq_len=33,
        block_table_tensor=torch.from_numpy(table),
        slot_mapping=torch.arange(18),
        is_prefilling=torch.tensor([False, True]),
    )
    return common, plan


@pytest.mark.parametrize("name", BACKENDS)
def test_kv_is_written_by_a_method_of_its_own(name: str) -> None:
    backend = backend_class(name)
    assert backend.get_name() == name
    assert backend.forward_includes_kv_cache_update is False
    write = inspect.signature(backend.get_impl_cls().do_kv_cache_update)
    assert list(write.parameters)[1:] == ["layer", "key", "value", "kv_cache", "slot_mapping"]


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_builders_take_more_virtual_requests_than_the_engine_has(runner: Any, name: str) -> None:
    group = build_group(runner, name)
    common, plan = batch_of_a_tree_and_a_prefill()
    assert len(plan.request_of) == 13 > runner.vllm_config.scheduler_config.max_num_seqs
    wrapped = TreeAttention.__new__(TreeAttention)
    wrapped.plan = plan
    wrapped._wrap_metadata(group)
    expected = expand_attention(common, plan)
    built = group.build_metadata(common)
    # Twelve branches of one node (the first with the root before it), then the prefill.
    assert built.query_start_loc.tolist() == [0, *range(2, 14), 18]
    assert built.seq_lens.tolist() == [22] * 12 + [5]
    assert built.max_query_len == 5
    assert built.max_seq_len == 22
    assert built.num_actual_tokens == 18
    assert built.block_table.tolist() == expected.block_table_tensor.tolist()
    assert built.block_table[0].tolist() == [0, 1, 2, 3], "the first branch uses its own blocks"
    assert {int(row[1]) for row in built.block_table[1:12]} <= set(range(100, 164))
    assert built.block_table[12].tolist() == [4, 5, 6, 7]
    assert built.slot_mapping is common.slot_mapping
    wrapped.plan = None
    plain = group.build_metadata(common)
    assert plain.query_start_loc is common.query_start_loc
    assert plain.block_table is common.block_table_tensor


def test_flash_attention_3_makes_no_schedule_for_a_tree(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer for the schedule has room for the engine's number of requests, no more."""
    import torch
    from vllm.v1.attention.backends import flash_attn

    asked: list[int] = []

    def schedule(batch_size: int, **_: Any) -> Any:
        asked.append(batch_size)
        return torch.zeros(1 + batch_size * 4, dtype=torch.int32)

    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", schedule, raising=False)
    group = build_group(runner, "FLASH_ATTN")
    builder = group.get_metadata_builder()
    builder.aot_schedule = builder.use_full_cuda_graph = True
    builder.aot_sliding_window = (-1, -1)
    builder.scheduler_metadata = torch.zeros(1 + 8 * 4, dtype=torch.int32)
    common, plan = batch_of_a_tree_and_a_prefill()
    with pytest.raises(RuntimeError):
        builder.build(0, expand_attention(common, plan))  # 13 > 8: what would happen
    asked.clear()
    wrapped = TreeAttention.__new__(TreeAttention)
    wrapped.plan = plan
    wrapped._wrap_metadata(group)
    assert group.build_metadata(common).scheduler_metadata is None
    assert asked == []
    wrapped.plan = None
    assert group.build_metadata(common).scheduler_metadata is not None
    assert asked == [2]


def stand_in(**changes: Any) -> Any:
    """A runner that branches suit, but for the changes."""
    parts: dict[str, Any] = {
        "backend": "FLASH_ATTN",
        "num_groups": 1,
        "kernel_block_size": None,
        "uses_mrope": False,
        "mm_prefix": False,
        "rswa_window": None,
        "fast_prefill": False,
        "use_ubatching": False,
        "piecewise": True,
        "splits_at_write": True,
        "fuse_rope_kvcache": False,
        **changes,
    }
    group = SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: parts["backend"]),
        kernel_block_size=parts["kernel_block_size"],
    )
    return SimpleNamespace(
        attn_groups=[[group] * parts["num_groups"]],
        model_config=SimpleNamespace(
            rswa_window=parts["rswa_window"],
            is_mm_prefix_lm=parts["mm_prefix"],
            uses_mrope=parts["uses_mrope"],
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=parts["fast_prefill"]),
        parallel_config=SimpleNamespace(use_ubatching=parts["use_ubatching"]),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_piecewise_cudagraphs=lambda: parts["piecewise"]),
            splitting_ops_contain_kv_cache_update=lambda: parts["splits_at_write"],
            pass_config=SimpleNamespace(fuse_rope_kvcache=parts["fuse_rope_kvcache"]),
        ),
    )


def test_what_branches_need_is_there(runner: Any) -> None:
    assert unsupported_reason(runner) is None
    assert unsupported_reason(stand_in()) is None
    assert unsupported_reason(stand_in(piecewise=False, splits_at_write=False)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "FLASHINFER"}, "attention backend FLASHINFER, expected one of"),
        ({"num_groups": 2}, "2 attention groups"),
        ({"kernel_block_size": 16}, "splits KV blocks"),
        ({"uses_mrope": True}, "rotary"),
        ({"mm_prefix": True}, "both directions"),
        ({"rswa_window": 128}, "different windows"),
        ({"fast_prefill": True}, "kv_sharing_fast_prefill"),
        ({"use_ubatching": True}, "micro-batches"),
        ({"splits_at_write": False}, "inside the CUDA graphs"),
        ({"fuse_rope_kvcache": True}, "fuse_rope_kvcache fuses the KV write"),
    ],
)
def test_where_only_the_first_path_is_used(changes: dict[str, Any], reason: str) -> None:
    assert reason in (unsupported_reason(stand_in(**changes)) or "")
