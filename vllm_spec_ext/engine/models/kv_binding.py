# SPDX-License-Identifier: Apache-2.0
"""Takes the draft models' layers out of a runner's attention groups and into their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import AttentionGroup

from vllm_spec_ext.errors import UnsupportedError
from vllm_spec_ext.proposers.late_drafting import padded

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_spec_ext.engine.models.host import ModelHost

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Attention backends whose metadata builders take any number of requests, as trees need, too."""


@dataclass(frozen=True)
class KvParts:
    """A KV cache as its runner made it."""

    by_layer: Mapping[str, torch.Tensor]  # addressed by the scheduler's block ids
    block_sizes: Sequence[int]  # of each KV group: tokens a block of its block table
    kernel_block_sizes: Sequence[int]  # of each KV group that has attention layers


def kv_group_of(runner: "GPUModelRunner | GPUModelRunnerV2", layer_names: set[str]) -> int:
    """The KV group that these layers share with the target.

    Raises:
        UnsupportedError: There is none.
    """
    for index, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if layer_names <= set(group.layer_names):
            if layer_names == set(group.layer_names):
                break  # without any layer of the target
            return index
    raise UnsupportedError(
        "the draft models' attention layers are not in one KV group with the target's, so they "
        "have no block table in common; expected full attention in the target and in the drafts, "
        "with KV of one data type"
    )


def bind_models(
    host: "ModelHost",
    runner: "GPUModelRunner | GPUModelRunnerV2",
    scratch: range,
    kv: KvParts,
) -> None:
    """Give the models their caches and metadata builders; the target's step forgets their layers.

    After this, vLLM builds metadata for the target's layers alone, and tree verification sees only
    these.

    Args:
        host: With loaded models.
        runner: Its KV cache initialised.
        scratch: Ids of the scratch blocks; those before are the requests'.
        kv: What that is made of.
    """
    host.group = index = kv_group_of(runner, host.layer_names)
    for groups in runner.attn_groups:
        for group in groups:
            group.layer_names[:] = [
                name for name in group.layer_names if name not in host.layer_names
            ]
        groups[:] = [group for group in groups if group.layer_names]
    num_blocks = runner.kv_cache_config.num_blocks
    for paged in host.paged:
        made = _attention_groups(runner, paged.layer_names, index)
        for group in made:
            group.create_metadata_builders(
                paged.vllm_config, runner.device, kv.kernel_block_sizes[index]
            )
            check_backend(group, "draft models")
            check_head_size(group, paged.vllm_config)
        caches = [kv.by_layer[name] for name in paged.layer_names]
        paged.bind(made, caches, num_blocks)
    host.bind(scratch.start, kv.block_sizes[index], scratch)


def _attention_groups(
    runner: "GPUModelRunner | GPUModelRunnerV2", layer_names: Sequence[str], index: int
) -> list[AttentionGroup]:
    """One group for each kind of layer (vLLM 0.32 ``GPUModelRunner.initialize_attn_backend``)."""
    spec = runner.kv_cache_config.kv_cache_groups[index].kv_cache_spec
    layers = runner.compilation_config.static_forward_context
    groups: list[AttentionGroup] = []
    kinds: list[tuple[str, KVCacheSpec, int]] = []
    for name in layer_names:
        own = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        backend = layers[name].get_attn_backend()
        kind = (backend.full_cls_name(), own, layers[name].num_heads)
        if kind in kinds:
            groups[kinds.index(kind)].layer_names.append(name)
            continue
        kinds.append(kind)
        groups.append(AttentionGroup(backend, [name], own, index))
    return groups


def check_backend(group: AttentionGroup, who: str) -> None:
    """Refuse layers that passes of ours cannot run.

    Args:
        group: The layers.
        who: Asks for the passes; for the message.

    Raises:
        UnsupportedError: An unknown backend, or one that splits KV blocks.
    """
    backend = group.backend.get_name()
    if backend not in BACKENDS:
        raise UnsupportedError(
            f"{who}: found attention backend {backend}, expected one of "
            f"{', '.join(BACKENDS)}; choose one with --attention-backend"
        )
    if group.kernel_block_size is not None:
        raise UnsupportedError(
            f"{who}: the attention kernel splits KV blocks; choose its own size with --block-size"
        )


def check_head_size(group: AttentionGroup, config: "VllmConfig") -> None:
    """Refuse layers whose heads are wider than the buffers of vLLM's Triton kernels.

    These are made for the heads of the configuration's model (vLLM 0.32
    ``TritonAttentionMetadataBuilder``), for drafters that read the target's states the target;
    wider heads would write behind their end.

    Args:
        group: The layers.
        config: That the group's metadata builder was made with.

    Raises:
        UnsupportedError: They are.
    """
    own = cast(AttentionSpec, group.kv_cache_spec).head_size
    most = config.model_config.get_head_size()
    if group.backend.get_name() == "TRITON_ATTN" and padded(own) > padded(most):
        raise UnsupportedError(
            f"draft models: found heads of {own} elements beside {most} of the target, which "
            "vLLM's Triton attention has no room for; expected no wider ones, or another "
            "--attention-backend"
        )
