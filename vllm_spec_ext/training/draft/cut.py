# SPDX-License-Identifier: Apache-2.0
"""Cutting a target to a smaller model of the same kind: fewer layers, heads, units and tokens.

"Decoding Speculative Decoding" (Yan et al. 2024): a draft's speed follows its latency, and
latency its depth. What is kept keeps the target's weights, so the result starts near the target;
the width of the residual stream stays, and with it the target's embedding.
"""

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm_spec_ext.errors import SpecExtError

Picked = tuple[tuple[int, ...], ...]  # for each kept layer, what is kept of it, ascending


@dataclass(frozen=True)
class Cut:
    """What is kept of a target."""

    layers: tuple[int, ...]  # ascending
    kv_heads: Picked | None = None  # with the attention heads that share them; None = all
    units: Picked | None = None  # of the feed-forward network; None = all
    vocab: int | None = None  # ids below this; None = all


def first_layers(count: int, of: int) -> tuple[int, ...]:
    """So many layers from the bottom: they read a stream that they know.

    Raises:
        SpecExtError: More than there are.
    """
    if count > of:
        raise SpecExtError(f"--layers {count}: the target has {of} layers; give at most {of}")
    return tuple(range(count))


def layer_list(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """The model's list of layers and its name.

    Raises:
        SpecExtError: There is not exactly one list of that length.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if len(found) != 1:
        raise SpecExtError(
            f"{type(model).__name__} has {len(found)} lists of {num_layers} layers, expected one; "
            "only plain decoder models can be cut"
        )
    return found[0]


def cut_config(config: Any, cut: Cut) -> Any:
    """The Hugging Face configuration of the cut model.

    Raises:
        SpecExtError: A configuration of several models (vision, audio), which are not cut.
    """
    if config.get_text_config() is not config:
        raise SpecExtError(
            f"{config.model_type} holds more than a text model; give a text model of the same "
            "tokenizer to --model"
        )
    num_layers = int(config.num_hidden_layers)
    new = copy.deepcopy(config)
    for name, value in config.to_dict().items():  # e.g. layer_types: one entry a layer
        if isinstance(value, list) and len(value) == num_layers:
            setattr(new, name, [value[i] for i in cut.layers])
    new.num_hidden_layers = len(cut.layers)
    if cut.kv_heads is not None:
        kept = len(cut.kv_heads[0])
        new.head_dim = head_size(config)
        new.num_attention_heads = kept * heads_per_group(config)
        new.num_key_value_heads = kept
    if cut.units is not None:
        new.intermediate_size = len(cut.units[0])
    if cut.vocab is not None:
        new.vocab_size = cut.vocab
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(new, name, _ids_below(getattr(config, name, None), cut.vocab))
    return new


def head_size(config: Any) -> int:
    """Width of an attention head."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def heads_per_group(config: Any) -> int:
    """Attention heads that share a KV head."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(config.num_attention_heads) // int(kv_heads)


def _ids_below(ids: Any, limit: int) -> Any:
    if isinstance(ids, list):
        kept = [i for i in ids if i < limit]
        return kept or None
    return ids if ids is not None and ids < limit else None


def cut_model(model: Any, cut: Cut) -> Any:
    """A new float32 model with the weights that are kept; the given one stays as it is.

    Args:
        model: Hugging Face causal LM.
        cut: What to keep; where nothing is cut away the function is the same.

    Raises:
        SpecExtError: Another layout than expected.
    """
    config = cut_config(model.config, cut)
    config.dtype = torch.float32
    path, _ = layer_list(model, int(model.config.num_hidden_layers))
    tables = {
        name
        for name, value in model.named_parameters(remove_duplicate=False)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None and any(value is own for own in module.parameters())
    }
    pattern = re.compile(re.escape(path) + r"\.(\d+)\.(.*)")
    places = {layer: place for place, layer in enumerate(cut.layers)}
    weights: dict[str, Tensor] = {}
    for full, value in model.state_dict().items():
        name, kept = full, value
        found = pattern.fullmatch(full)
        if found:
            place = places.get(int(found[1]))
            if place is None:
                continue
            name = f"{path}.{place}.{found[2]}"
            kept = _narrowed(found[2], value, cut, place, model.config)
        elif cut.vocab is not None and full in tables:
            kept = value[: cut.vocab]
        weights[name] = kept.detach().to("cpu", torch.float32).clone()
    small = type(model)(config).float().eval()
    try:
        small.load_state_dict(weights)
    except RuntimeError as error:
        raise SpecExtError(
            f"{type(model).__name__} cannot be cut this way: {error}; cut layers only"
        ) from error
    if model.generation_config is not None:
        small.generation_config = copy.deepcopy(model.generation_config)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id") if cut.vocab else ():
            found_ids = getattr(model.generation_config, name, None)
            setattr(small.generation_config, name, _ids_below(found_ids, cut.vocab or 0))
    return small


_ROWS_BY_HEAD = ("q_proj", "k_proj", "v_proj")
_ROWS_BY_UNIT = ("gate_proj", "up_proj")


def _narrowed(name: str, value: Tensor, cut: Cut, place: int, config: Any) -> Tensor:
    """What is kept of one weight of a layer: rows of what goes in, columns of what comes out."""
    owner, _, kind = name.rpartition(".")
    owner = owner.rpartition(".")[2]
    if cut.kv_heads is not None and owner in (*_ROWS_BY_HEAD, "o_proj"):
        group = 1 if owner in ("k_proj", "v_proj") else heads_per_group(config)
        size = head_size(config) * group
        index = [h * size + i for h in cut.kv_heads[place] for i in range(size)]
    elif cut.units is not None and owner in (*_ROWS_BY_UNIT, "down_proj"):
        index = list(cut.units[place])
    else:
        return value
    if owner in ("o_proj", "down_proj"):  # their biases are as wide as the residual stream
        return value[:, index] if kind == "weight" else value
    return value[index]
