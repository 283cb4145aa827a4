# SPDX-License-Identifier: Apache-2.0
"""Applies a :class:`TreePlan` to vLLM's paged attention: scratch blocks, KV writes, metadata.

Needs of a backend: KV is written by ``impl.do_kv_cache_update`` before attention runs, outside any
CUDA graph; attention is causal over the block table of each request in ``CommonAttentionMetadata``;
the metadata builder keeps no buffer of as many rows as the engine has requests, as there may be
more virtual ones. CPU_ATTN, FLASH_ATTN and TRITON_ATTN keep that (vLLM 0.32), where
:func:`unsupported_reason` finds nothing. Everything here is inert while no plan is active.
"""

import dataclasses
import logging
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.trees.block_copies import LayerBlocks
from vllm_spec_ext.engine.trees.plan import TreePlan, build_plan, warm_up
from vllm_spec_ext.engine.trees.plan_tensors import on_device
from vllm_spec_ext.scorers.walk.tree import Walk

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

logger = logging.getLogger("vllm.spec_ext")

BlockTable = Sequence[Sequence[int]] | Sequence[NDArray[np.int32]] | NDArray[np.int32]
"""Block ids of each request."""

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Attention backends that keep the contract above; the tests hold their builders to it."""


def with_scratch(kv_cache_config: "KVCacheConfig", num_scratch: int) -> "KVCacheConfig":
    """A copy of vLLM's ``KVCacheConfig`` with more blocks at the end of every layer's cache.

    Layer-outermost layouts keep each layer contiguous, so their strides and offsets grow with the
    number of blocks; block-outermost ones only get longer (vLLM 0.32 ``KVCacheTensor``).
    """
    result = deepcopy(kv_cache_config)
    old, new = result.num_blocks, result.num_blocks + num_scratch
    result.num_blocks = new
    tensors = []
    for tensor in result.kv_cache_tensors:
        changed = {"size": tensor.size // old * new}
        if tensor.layer_stride >= tensor.block_stride * old:
            changed["layer_stride"] = tensor.layer_stride // old * new
            changed["offset"] = tensor.offset // old * new
        tensors.append(dataclasses.replace(tensor, **changed))
    result.kv_cache_tensors = tensors
    return result


def unsupported_reason(runner: "GPUModelRunner | GPUModelRunnerV2") -> str | None:
    """Why this runner cannot verify branches; None if it can."""
    groups = [group for groups in runner.attn_groups for group in groups]
    if len(groups) != 1:
        return f"the model has {len(groups)} attention groups, expected one"
    backend = groups[0].backend.get_name()
    if backend not in BACKENDS:
        return f"attention backend {backend}, expected one of {', '.join(BACKENDS)}"
    if groups[0].kernel_block_size is not None:
        return "the attention kernel splits KV blocks; choose its own size with --block-size"
    if runner.model_config.uses_mrope:
        return "the model uses multi-dimensional rotary positions"
    if runner.model_config.is_mm_prefix_lm:
        return "the model attends to images in both directions"
    if runner.model_config.rswa_window is not None:
        return "the model attends to prompt and output through different windows"
    if runner.cache_config.kv_sharing_fast_prefill:
        return "kv_sharing_fast_prefill is on"
    if runner.parallel_config.use_ubatching:
        return "the batch is split into micro-batches (enable_dbo)"
    compilation = runner.compilation_config
    graphs = compilation.cudagraph_mode
    if (
        graphs.has_piecewise_cudagraphs()
        and not compilation.splitting_ops_contain_kv_cache_update()
    ):
        return (
            "the KV write is inside the CUDA graphs (as with use_inductor_graph_partition, fused "
            "attention quantization, breakable graphs, or splitting_ops without "
            "vllm::unified_kv_cache_update)"
        )
    passes = compilation.pass_config
    for name in ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache", "fuse_rope_kvcache_cat_mla"):
        if getattr(passes, name, False):
            return f"compilation pass {name} fuses the KV write"
    return None


class TreeAttention:
    """The scratch blocks of one runner and the plan of its current step; for both runners."""

    def __init__(
        self,
        runner: "GPUModelRunner | GPUModelRunnerV2",
        scratch: Sequence[int],
        caches: Sequence[torch.Tensor],
        block_size: int,
    ) -> None:
        """Hook into the runner's only attention group.

        Args:
            runner: vLLM's model runner, its KV cache initialised with the scratch blocks.
            scratch: Their ids.
            caches: Of the target's layers, by the scheduler's blocks.
            block_size: Tokens a block of the request's block table.
        """
        self.scratch = np.array(scratch, np.int64)
        self.block_size = block_size
        self.plan: TreePlan | None = None
        self._device: torch.device = runner.device
        self._table: BlockTable = ()
        self._written: tuple[torch.Tensor, torch.Tensor] | None = None
        group = runner.attn_groups[0][0]
        self._wrap_metadata(group)
        self._blocks = LayerBlocks(caches, runner.kv_cache_config.num_blocks)
        warm_up()
        for name in group.layer_names:
            self._wrap_write(runner.compilation_config.static_forward_context[name].impl)

    def plan_step(
        self, step: Step, starts: Sequence[int], computed: Sequence[int], table: BlockTable
    ) -> None:
        """Lay out the trees of a step, if it has any; after vLLM prepared its inputs.

        Args:
            step: Is told which nodes there is room for.
            starts: First row of each request.
            computed: Tokens of each whose KV is there.
            table: Block ids of each request; those of requests without a tree are not looked at.
        """
        self.end_step()
        requests = step.tree_rows(starts, computed)
        if any(request.parents is not None for request in requests):
            self._table = table
            self.plan = build_plan(requests, table, self.block_size, self.scratch)
            step.kept = self.plan.kept.tolist()

    def end_step(self) -> None:
        """The tree is verified: passes of the target between steps have nothing to do with it."""
        self.plan, self._written = None, None

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Put the plan into effect: positions, slots, copies of the tail blocks.

        Args:
            positions: [num_rows] int64 of the step; changed in place.
            slots: [num_rows] int64 of the step's KV; changed in place.
        """
        plan = self.plan
        assert plan is not None
        new = on_device(plan, self._device)
        if len(plan.rows):
            positions.index_copy_(0, new.rows, new.positions)
            slots.index_copy_(0, new.rows, new.slots)
        self.copy_blocks(plan.tail_copies.tolist(), new.tail_copies)

    def commit(self, walk: Walk) -> None:
        """Put the accepted tokens' KV in its place, before anything counts as computed."""
        assert self.plan is not None
        requests, blocks, columns = self.plan.commits(walk.accepted, walk.num_accepted)
        found = zip(requests.tolist(), blocks.tolist(), columns.tolist(), strict=True)
        self.copy_blocks([(block, int(self._table[r][column])) for r, block, column in found])

    def copy_blocks(
        self, pairs: Sequence[Sequence[int]], placed: torch.Tensor | None = None
    ) -> None:
        """Copy whole KV blocks of the target's layers; see :meth:`.block_copies.LayerBlocks.copy`.

        Args:
            pairs: (from, to); no block may be on both sides.
            placed: [2 * n] int64 the same on the device, where it is there already.
        """
        self._blocks.copy(pairs, placed)

    def _wrap_write(self, impl: "CPUAttentionBackendImpl") -> None:
        """When a layer writes its KV, let it write the shared ancestors into scratch blocks too."""
        write = impl.do_kv_cache_update

        def do_kv_cache_update(
            layer: Any,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            slot_mapping: torch.Tensor,
        ) -> None:
            if self.plan is not None and len(self.plan.rows):
                rows, slot_mapping = self._all_written(len(key), slot_mapping)
                key, value = key.index_select(0, rows), value.index_select(0, rows)
            write(layer, key, value, kv_cache, slot_mapping)

        impl.do_kv_cache_update = do_kv_cache_update

    def _all_written(self, num_rows: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a step, those of shared ancestors once more, and their slots; for all layers."""
        if self._written is None:
            assert self.plan is not None
            new = on_device(self.plan, slots.device)
            rows = torch.arange(num_rows, device=slots.device)
            # vLLM may pass more slots than rows, or more rows than slots: the shorter counts.
            count = min(num_rows, len(slots))
            self._written = (
                torch.cat([rows[:count], new.shared_rows]),
                torch.cat([slots[:count], new.shared_slots]),
            )
        return self._written

    def _wrap_metadata(self, group: "AttentionGroup") -> None:
        """Give the metadata builder one virtual request a segment."""
        build = group.build_metadata

        def build_metadata(common: "CommonAttentionMetadata", *args: Any, **kwargs: Any) -> Any:
            if self.plan is None:
                return build(common, *args, **kwargs)
            # Not ahead of time: FlashAttention 3's schedule goes into a buffer made for the
            # engine's number of requests
            # (vLLM 0.32 FlashAttentionMetadataBuilder._store_scheduler_metadata).
            return build(expand_attention(common, self.plan), *args, fast_build=True, **kwargs)

        group.build_metadata = build_metadata


def expand_attention(
    common: "CommonAttentionMetadata", plan: TreePlan
) -> "CommonAttentionMetadata":
    """vLLM's ``CommonAttentionMetadata`` with virtual requests in place of the batch's."""
    new = on_device(plan, common.block_table_tensor.device)
    of = new.request_of
    table = common.block_table_tensor.index_select(0, of)
    if len(plan.table_rows):
        table[new.table_rows, new.table_columns] = new.table_blocks
    prefilling = common.is_prefilling
    upper = common.seq_lens_cpu_upper_bound
    return common.replace(
        query_start_loc=new.query_starts,
        query_start_loc_cpu=torch.from_numpy(plan.query_starts),
        seq_lens=new.seq_lens,
        seq_lens_cpu_upper_bound=None if upper is None else torch.from_numpy(plan.seq_lens),
        num_reqs=len(plan.request_of),
        max_query_len=plan.longest_query,
        max_seq_len=plan.longest_seq,
        block_table_tensor=table,
        is_prefilling=None if prefilling is None else prefilling[_on(prefilling.device, plan)],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def _on(device: torch.device, plan: TreePlan) -> torch.Tensor:
    """``request_of``; on the host without waiting for the device."""
    if device.type == "cpu":
        return torch.from_numpy(plan.request_of)
    return on_device(plan, device).request_of
