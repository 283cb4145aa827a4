# SPDX-License-Identifier: Apache-2.0
"""Gives the views the target's caches and attention groups of a runner."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_spec_ext.engine.models.kv_binding import KvParts, check_backend
from vllm_spec_ext.engine.views.page_means import columns_of_keys, rows_of_keys
from vllm_spec_ext.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_spec_ext.engine.views.view_host import ViewHost


def bind_views(
    host: "ViewHost",
    runner: "GPUModelRunner | GPUModelRunnerV2",
    scratch: range,
    kv: KvParts,
) -> None:
    """Give the views the target's caches.

    Args:
        host: With the target.
        runner: Its KV cache initialised; draft models' layers are taken out of its groups.
        scratch: Ids of the scratch blocks; those before are the requests'.
        kv: What that is made of.

    Raises:
        UnsupportedError: The layers' attention is not what views can shorten.
    """
    check_layers(runner, kv.by_layer)
    (groups,) = [groups for groups in runner.attn_groups if groups]
    names = sorted((name for group in groups for name in group.layer_names), key=depth_of)
    check_numbers(host, names)
    is_cpu = groups[0].backend.get_name() == "CPU_ATTN"
    host.bind(
        scratch.start,
        kv.block_sizes[groups[0].kv_cache_group_id],
        scratch,
        groups=groups,
        caches={name: kv.by_layer[name] for name in names},
        read_keys=columns_of_keys if is_cpu else rows_of_keys,
    )


def check_numbers(host: "ViewHost", names: Sequence[str]) -> None:
    """Refuse numbers of dense layers where some layers have no attention."""
    numbers = [depth_of(name)[0] for name in names]
    if any(spec.dense_layers for spec in host.specs) and numbers != list(range(len(names))):
        raise UnsupportedError(
            f"dense_layers: found {len(names)} layers with attention that are not numbered one "
            'after the other, expected attention in every layer; leave "dense_layers" out'
        )


def depth_of(layer_name: str) -> tuple[int, ...]:
    """The numbers in a layer's name, by which layers are in the order of the model."""
    return tuple(map(int, re.findall(r"(?<![^.])\d+(?![^.])", layer_name)))


def check_layers(
    runner: "GPUModelRunner | GPUModelRunnerV2", kv_by_layer: Mapping[str, torch.Tensor]
) -> None:
    """Refuse what the front end could not see: it knows no layers.

    Raises:
        UnsupportedError: With the first reason found.
    """
    used = [groups for groups in runner.attn_groups if groups]
    if len(used) != 1:
        raise UnsupportedError(
            f"views of the cache: found {len(used)} KV groups, expected one: all layers of the "
            "target with full attention; use another method"
        )
    layers = runner.compilation_config.static_forward_context
    for group in used[0]:
        check_backend(group, "views of the cache")
        for name in group.layer_names:
            if name not in kv_by_layer:
                raise UnsupportedError(
                    f"views of the cache: layer {name} has no KV cache of its own, expected one a "
                    "layer; use another method"
                )
            if getattr(layers[name].impl, "alibi_slopes", None) is not None:
                raise UnsupportedError(
                    f"views of the cache: layer {name} has ALiBi, which counts places in the block "
                    "table as distances; expected rotary positions; use another method"
                )
