# SPDX-License-Identifier: Apache-2.0
"""Layers with other weights: each rank's part of them, and nothing changed before they are put."""

from typing import Any

import pytest
import torch
from torch import nn

from vllm_spec_ext.engine.models.block_layers import layers_of, put_layers

HIDDEN, HEADS, SIZE, UNITS = 8, 4, 6, 12
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
SHAPES = {
    "q": (HEADS * SIZE, HIDDEN),
    "gate": (UNITS, HIDDEN),
    "up": (UNITS, HIDDEN),
    "down": (HIDDEN, UNITS),
    "o": (HIDDEN, HEADS * SIZE),
}


class Norm(nn.Module):
    """As vLLM's: which function runs is decided once, and bound to this very object."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self._forward_method = self.scaled

    def scaled(self, states: torch.Tensor) -> torch.Tensor:
        return states * self.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self._forward_method(states)


class Packing:
    """A platform that keeps matrices in a form of its own."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.detach().clone()
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def linear(**facts: Any) -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(torch.empty(0))
    vars(made).update(facts, quant_method=Packing(), params_dtype=torch.bfloat16)
    return made


def drafter(rank: int, ranks: int, kv_heads: int) -> nn.Module:
    """One layer, with the attributes of vLLM's."""
    replicas = max(1, ranks // kv_heads)
    layer = nn.Module()
    layer.self_attn, layer.mlp = nn.Module(), nn.Module()
    for path in NORMS:
        above, _, name = path.rpartition(".")
        layer.get_submodule(above).add_module(name, Norm())
    part = {"tp_rank": rank}
    layer.self_attn.qkv_proj = linear(
        **part,
        num_heads=HEADS // ranks,
        num_kv_heads=max(1, kv_heads // ranks),
        num_kv_head_replicas=replicas,
        head_size=SIZE,
    )
    layer.self_attn.o_proj = linear(**part, input_size_per_partition=HEADS * SIZE // ranks)
    layer.mlp.gate_up_proj = linear(**part, output_partition_sizes=[UNITS // ranks] * 2)
    layer.mlp.down_proj = linear(**part, input_size_per_partition=UNITS // ranks)
    module = nn.Module()
    module.model = nn.Module()
    module.model.layers = nn.ModuleList([layer])
    module.model.norm = Norm()
    return module


def weights(kv_heads: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (HIDDEN,)}
    shapes |= {f"layers.0.{name}.weight": (HIDDEN,) for name in NORMS}
    of_keys = (kv_heads * SIZE, HIDDEN)
    for name, shape in {**SHAPES, "k": of_keys, "v": of_keys}.items():
        above = "self_attn" if name in "qkvo" else "mlp"
        shapes[f"layers.0.{above}.{name}_proj.weight"] = shape
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 2), (4, 2)])
def test_the_ranks_together_have_the_whole(ranks: int, kv_heads: int) -> None:
    """With more ranks than heads of keys, some ranks have the same ones."""
    given = weights(kv_heads)
    parts = [layers_of(drafter(rank, ranks, kv_heads), given) for rank in range(ranks)]
    place = "model.layers.0"

    def whole(name: str) -> torch.Tensor:
        return given[f"layers.0.{name}.weight"].bfloat16()

    def packed(name: str) -> list[torch.Tensor]:
        return [part[f"{place}.{name}"].packed for part in parts]

    own, shared = HEADS * SIZE // ranks, max(1, kv_heads // ranks) * SIZE
    queries, keys, values = zip(
        *(rows.split([own, shared, shared]) for rows in packed("self_attn.qkv_proj")), strict=True
    )
    assert torch.equal(torch.cat(queries), whole("self_attn.q_proj"))
    for found, name in ((keys, "k"), (values, "v")):
        expected = whole(f"self_attn.{name}_proj").unflatten(0, (kv_heads, SIZE))
        per_head = torch.cat(found).unflatten(0, (-1, SIZE))
        replicas = len(per_head) // kv_heads
        assert torch.equal(per_head, expected.repeat_interleave(replicas, dim=0))
    gates, ups = zip(*(rows.chunk(2) for rows in packed("mlp.gate_up_proj")), strict=True)
    assert torch.equal(torch.cat(gates), whole("mlp.gate_proj"))
    assert torch.equal(torch.cat(ups), whole("mlp.up_proj"))
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert torch.equal(torch.cat(packed(name), dim=1), whole(name))


def test_put_in_place_and_not_before() -> None:
    """What makes the context is never put."""
    module, given = drafter(0, 1, 2), weights(2)
    before = dict(module.named_modules())
    norms = {name: value.clone() for name, value in module.named_parameters()}
    made = layers_of(module, given)
    assert all(module.get_submodule(name) is layer for name, layer in before.items())
    assert all(torch.equal(norms[name], value) for name, value in module.named_parameters())
    put_layers(module, made)
    layer: Any = module.model.layers[0]
    ones = torch.ones(HIDDEN)
    assert torch.equal(module.model.norm(ones), given["norm.weight"])
    queries = given["layers.0.self_attn.q_norm.weight"]
    assert torch.equal(layer.self_attn.q_norm(ones), queries)
    assert torch.equal(layer.self_attn.k_norm(ones), ones)
    assert len(made) == 8
