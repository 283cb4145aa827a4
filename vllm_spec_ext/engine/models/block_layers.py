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
) -> dict[str, torch.nn.Module]:
    """Layers of this rank with other weights, by their paths in the module; nothing changes there.

    Args:
        module: vLLM's model, unquantized.
        weights: Whole ones, by their names in the checkpoint.
    """
    model = cast("DFlashQwen3ForCausalLM", module).model
    made = {"model.norm": _norm(model.norm, weights["norm.weight"])}
    layer: DFlashQwen3DecoderLayer
    for number, layer in enumerate(model.layers):
        names = f"layers.{number}"
        place = f"model.{names}"
        for kind in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm"):
            own_norm = module.get_submodule(f"{place}.{kind}")
            made[f"{place}.{kind}"] = _norm(own_norm, weights[f"{names}.{kind}.weight"])
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


def put_layers(module: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> None:
    """Use layers in place of those at their paths."""
    for path, layer in layers.items():
        above, _, name = path.rpartition(".")
        setattr(module.get_submodule(above), name, layer)


def _part(whole: torch.Tensor, dim: int, size: int, number: int) -> torch.Tensor:
    return whole.narrow(dim, number * size, size)


def _linear(linear: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    facts = cast("LinearBase", linear)
    # Its own weight may be empty and of any type, where the platform packed it.
    made = _with_weight(linear, weight.to(facts.params_dtype))
    facts.quant_method.process_weights_after_loading(made)
    return made


def _norm(norm: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    return _with_weight(norm, weight.to(norm.get_parameter("weight").dtype))


def _with_weight(layer: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    """A shallow copy with another weight, which is copied."""
    made = copy.copy(layer)
    made._parameters = dict(layer._parameters)
    weight = weight.to(layer.get_parameter("weight").device, copy=True).contiguous()
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made
