# SPDX-License-Identifier: Apache-2.0
"""Layers of a running DFlash drafter with other weights, to be put in place of its own.

What makes the context's keys and values stays (:func:`.proposers.nar.layout.makes_context`), and so
do the attention layers with their caches. Where a platform packs matrices they are packed when a
version is loaded; to use it is to put layers into others.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.models.qwen3_dflash import (
        DFlashQwen3DecoderLayer,
        DFlashQwen3ForCausalLM,
    )


def layers_of(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.nn.Module | torch.nn.Parameter]:
    """Layers of this rank with other weights, by their paths in the module; nothing changes there.

    Of norms the weights alone: vLLM's are bound to their first selves (0.32 ``CustomOp``), so a
    copy would go on with the old weight.

    Args:
        module: vLLM's model, unquantized.
        weights: Whole ones, by their names in the checkpoint.
    """
    model = cast("DFlashQwen3ForCausalLM", module).model
    made: dict[str, torch.nn.Module | torch.nn.Parameter] = {
        "model.norm.weight": _norm(model.norm, weights["norm.weight"])
    }
    layer: DFlashQwen3DecoderLayer
    for number, layer in enumerate(model.layers):
        names = f"layers.{number}"
        place = f"model.{names}"
        for kind in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm"):
            own_norm = module.get_submodule(f"{place}.{kind}")
            weight = weights[f"{names}.{kind}.weight"]
            made[f"{place}.{kind}.weight"] = _norm(own_norm, weight)
        attention, mlp = layer.self_attn, layer.mlp
        qkv = attention.qkv_proj
        queries, keys, values = (weights[f"{names}.self_attn.{kind}_proj.weight"] for kind in "qkv")
        size = qkv.head_size
        with_keys = qkv.tp_rank // qkv.num_kv_head_replicas
        rows = [
            _part(queries, 0, qkv.num_heads * size, qkv.tp_rank),
            *(_part(each, 0, qkv.num_kv_heads * size, with_keys) for each in (keys, values)),
        ]
        made[f"{place}.self_attn.qkv_proj"] = _linear(qkv, torch.cat(rows))
        up = mlp.gate_up_proj
        both = [
            _part(weights[f"{names}.mlp.{kind}_proj.weight"], 0, own_size, up.tp_rank)
            for kind, own_size in zip(("gate", "up"), up.output_partition_sizes, strict=True)
        ]
        made[f"{place}.mlp.gate_up_proj"] = _linear(up, torch.cat(both))
        for kind, own in (("self_attn.o_proj", attention.o_proj), ("mlp.down_proj", mlp.down_proj)):
            whole = weights[f"{names}.{kind}.weight"]
            part = _part(whole, 1, own.input_size_per_partition, own.tp_rank)
            made[f"{place}.{kind}"] = _linear(own, part)
    return made


def put_layers(
    module: torch.nn.Module, layers: Mapping[str, torch.nn.Module | torch.nn.Parameter]
) -> None:
    """Use layers and weights in place of those at their paths."""
    for path, layer in layers.items():
        above, _, name = path.rpartition(".")
        setattr(module.get_submodule(above), name, layer)


def _part(whole: torch.Tensor, dim: int, size: int, number: int) -> torch.Tensor:
    return whole.narrow(dim, number * size, size)


def _norm(norm: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Parameter:
    own = norm.get_parameter("weight")
    return _parameter(weight.to(own.dtype), own.device)


def _linear(linear: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    """A shallow copy with another weight."""
    facts = cast("LinearBase", linear)
    made = copy.copy(linear)
    made._parameters = dict(linear._parameters)
    # Its own weight may be empty and of any type, where the platform packed it.
    device = linear.get_parameter("weight").device
    made.weight = _parameter(weight.to(facts.params_dtype), device)
    facts.quant_method.process_weights_after_loading(made)
    return made


def _parameter(weight: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.to(device, copy=True).contiguous(), requires_grad=False)
