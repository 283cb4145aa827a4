# SPDX-License-Identifier: Apache-2.0
"""Cutting a target: what is kept computes what it computed before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.draft.cut import Cut, cut_model, first_layers
from vllm_spec_ext.training.draft.importance import pick_kv_heads, pick_units

IDS = torch.arange(1, 25).view(2, 12) * 7 % 300


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def run_of(model: Any) -> Any:
    return lambda: logits(model)


def test_nothing_cut_is_the_same_function(model: Any) -> None:
    all_layers = tuple(range(4))
    same = Cut(all_layers, kv_heads=((0, 1),) * 4, units=(tuple(range(48)),) * 4, vocab=320)
    for cut in (Cut(all_layers), same):
        assert torch.equal(logits(cut_model(model, cut).eval()), logits(model))


def test_layers_cut_away_are_passed_over(model: Any) -> None:
    """A reference that needs no cutting: the other layers add nothing to the residual stream."""
    import copy

    silent = copy.deepcopy(model)
    for layer in (0, 2):
        torch.nn.init.zeros_(silent.model.layers[layer].self_attn.o_proj.weight)
        torch.nn.init.zeros_(silent.model.layers[layer].mlp.down_proj.weight)
    small = cut_model(model, Cut((1, 3))).eval()
    assert small.config.num_hidden_layers == 2
    assert torch.allclose(logits(small), logits(silent), atol=1e-5)
    assert not torch.allclose(logits(small), logits(model), atol=1e-1)


def test_heads_and_units_cut_away_are_silent(model: Any) -> None:
    import copy

    silent = copy.deepcopy(model)
    heads, units = ((1,), (0,), (1,), (0,)), ((1, 5, 40), (0, 2, 3), (7, 8, 9), (10, 20, 30))
    for layer, (kept_heads, kept_units) in enumerate(zip(heads, units, strict=True)):
        block = silent.model.layers[layer]
        with torch.no_grad():
            for kv_head in {0, 1} - set(kept_heads):  # two heads of eight share a KV head
                block.self_attn.o_proj.weight[:, kv_head * 16 : kv_head * 16 + 16] = 0.0
            for unit in set(range(48)) - set(kept_units):
                block.mlp.down_proj.weight[:, unit] = 0.0
    small = cut_model(model, Cut(tuple(range(4)), heads, units)).eval()
    assert small.config.num_attention_heads == 2
    assert small.config.num_key_value_heads == 1
    assert small.config.head_dim == 8
    assert small.config.intermediate_size == 3
    assert torch.allclose(logits(small), logits(silent), atol=1e-5)


def test_a_cut_vocabulary_keeps_the_logits_of_its_tokens(model: Any) -> None:
    small = cut_model(model, Cut(tuple(range(4)), vocab=100)).eval()
    ids = IDS % 100
    assert torch.allclose(logits(small, ids), logits(model, ids)[..., :100], atol=1e-6)
    assert small.get_input_embeddings().weight.shape == (100, 32)
    assert small.config.vocab_size == 100


def test_an_own_projection_is_cut_too(model: Any) -> None:
    """Not every model shares its embedding with its projection, and some have biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    untied = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            initializer_range=0.2,
        )
    ).eval()
    for module in untied.modules():
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            torch.nn.init.normal_(module.bias)
    small = cut_model(untied, Cut((0, 1, 2), kv_heads=((0, 1),) * 3, vocab=100)).eval()
    ids = IDS % 100
    assert torch.allclose(logits(small, ids), logits(untied, ids)[..., :100], atol=1e-6)
    assert len(cut_model(untied, Cut((2,))).config.layer_types) == 1


def test_first_layers() -> None:
    assert first_layers(1, 30) == (0,)
    assert first_layers(4, 4) == (0, 1, 2, 3)
    with pytest.raises(SpecExtError, match="the target has 4 layers"):
        first_layers(5, 4)


def test_the_important_units_are_kept(model: Any) -> None:
    """Units that are made louder, and heads whose way back is made wider, are the ones kept."""
    import copy

    loud = copy.deepcopy(model)
    with torch.no_grad():
        loud.model.layers[1].mlp.up_proj.weight[[3, 30]] *= 50.0
        loud.model.layers[3].mlp.down_proj.weight[:, [4, 40]] *= 50.0
        loud.model.layers[3].self_attn.o_proj.weight[:, 16:] *= 50.0
        loud.model.layers[1].self_attn.v_proj.weight[:8] *= 50.0
    assert pick_units(loud, (1, 3), 2, run_of(loud)) == ((3, 30), (4, 40))
    assert pick_kv_heads(loud, (1, 3), 2, run_of(loud)) == ((0,), (1,))


def test_what_cannot_be_cut_is_refused(model: Any) -> None:
    with pytest.raises(SpecExtError, match="multiple of 2"):
        pick_kv_heads(model, (0,), 3, run_of(model))
    with pytest.raises(SpecExtError, match="at most"):
        pick_units(model, (0,), 49, run_of(model))
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=3, n_head=4)).eval()
    with pytest.raises(SpecExtError, match="cut layers only"):
        pick_units(other, (0,), 2, run_of(other))
    assert torch.allclose(logits(cut_model(other, Cut((0, 1, 2))).eval()), logits(other), atol=1e-6)
    assert cut_model(other, Cut((0, 2))).config.n_layer == 2
