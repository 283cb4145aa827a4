# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 checkpoints for the tiny target in the public layout, and a target they can foresee."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def eagle3_config(target: Path, draft_vocab_size: int, **changes: Any) -> dict[str, Any]:
    """config.json as of the public checkpoints, of the target's sizes."""
    theirs = json.loads((target / "config.json").read_text())
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "hidden_act",
    )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **{name: theirs[name] for name in names},
        **changes,
    }


def random_tensors(config: dict[str, Any], seed: int, num_states: int = 3) -> Tensors:
    """A random head; of the target's vocabulary it knows every k-th token."""
    torch.manual_seed(seed)
    size, head = config["hidden_size"], config["head_dim"]
    target_size = config.get("target_hidden_size", size)
    draft, vocab = config["draft_vocab_size"], config["vocab_size"]
    tensors = {"fc.weight": _weight(size, num_states * target_size)}
    tensors |= _layer(config, "midlayer", 2 * size)
    tensors["midlayer.hidden_norm.weight"] = torch.ones(size)
    for number in range(1, config["num_hidden_layers"]):
        tensors |= _layer(config, f"layers.{number}", size)
    tensors["norm.weight"] = torch.ones(size)
    tensors["lm_head.weight"] = _weight(draft, size)
    if draft != vocab:
        known = torch.arange(draft) * (vocab // draft) + 1
        tensors["d2t"] = known - torch.arange(draft)
        tensors["t2d"] = torch.isin(torch.arange(vocab), known)
    if config.get("attention_bias"):
        weights = [name for name in tensors if ".self_attn." in name]
        for name in weights:
            tensors[name.replace(".weight", ".bias")] = torch.randn(len(tensors[name]))
    if config["model_type"] == "qwen3":
        for name in ("q_norm", "k_norm"):
            tensors[f"midlayer.self_attn.{name}.weight"] = 1.0 + 0.3 * torch.randn(head)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1.0 + 0.3 * torch.randn(num_states * target_size)
    if config.get("fc_norm"):
        for number in range(num_states):
            tensors[f"fc_norm.{number}.weight"] = 1.0 + 0.3 * torch.randn(target_size)
    return tensors


def _layer(config: dict[str, Any], name: str, num_read: int) -> Tensors:
    size, width, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{name}.self_attn.q_proj.weight": _weight(queries, num_read),
        f"{name}.self_attn.k_proj.weight": _weight(keys, num_read),
        f"{name}.self_attn.v_proj.weight": _weight(keys, num_read),
        f"{name}.self_attn.o_proj.weight": _weight(size, queries),
        f"{name}.mlp.gate_proj.weight": _weight(width, size),
        f"{name}.mlp.up_proj.weight": _weight(width, size),
        f"{name}.mlp.down_proj.weight": _weight(size, width),
        f"{name}.input_layernorm.weight": torch.ones(size),
        f"{name}.post_attention_layernorm.weight": torch.ones(size),
    }


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.12


def save_eagle3(
    target: Path,
    folder: Path,
    *,
    seed: int = 3,
    draft_vocab_size: int = 256,
    embeddings: bool = False,
    without: tuple[str, ...] = (),
    as_bin: bool = False,
    speculators: bool = False,
    **changes: Any,
) -> str:
    """Write a random head.

    Args:
        target: Folder of the target.
        folder: Where to; made here.
        seed: Of the weights.
        draft_vocab_size: Its own vocabulary.
        embeddings: It has some of its own; else they are the target's.
        without: Names of tensors to leave out.
        as_bin: Weights in PyTorch's format.
        speculators: In the layout of the library of that name.
        **changes: Of config.json.

    Returns:
        The folder.
    """
    config = eagle3_config(target, draft_vocab_size, **changes)
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    layers = layers or config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    tensors = random_tensors(config, seed, len(layers) if layers else 3)
    if embeddings:
        tensors["embed_tokens.weight"] = torch.randn(config["vocab_size"], config["hidden_size"])
    if speculators:
        config = _as_speculators(config, target)
        tensors = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    write(folder, config, {n: t for n, t in tensors.items() if n not in without}, as_bin)
    return str(folder)


def _as_speculators(config: dict[str, Any], target: Path) -> dict[str, Any]:
    """config.json as the library ``speculators`` writes it."""
    outside = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    method = {"proposal_type": "greedy", "speculative_tokens": 4}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {k: v for k, v in config.items() if k not in outside},
        **{name: config[name] for name in outside if name in config},
    }


def write(folder: Path, config: dict[str, Any], tensors: Tensors, as_bin: bool = False) -> None:
    """A checkpoint's two files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if as_bin:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


def save_walker(tiny_model: Path, folder: Path) -> tuple[str, str]:
    """A target that walks along a permutation of its tokens, and a head that is one step ahead.

    The target's layers add nothing to its embeddings, so each token decides the next. The head
    adds nothing to the state it reads, that of the token before the last one; from it follows the
    next but one. Its first draft is right if, and only if, it has the right state.

    Returns:
        The folders of both.
    """
    target, head = folder / "walker", folder / "ahead"
    shutil.copytree(tiny_model, target)
    weights = load_file(target / "model.safetensors")
    vocab, size = weights["model.embed_tokens.weight"].shape
    after = torch.from_numpy(np.random.default_rng(5).permutation(vocab))
    embeddings = weights["model.embed_tokens.weight"]
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    weights["lm_head.weight"] = torch.empty(vocab, size).index_copy_(0, after, embeddings)
    save_file(weights, target / "model.safetensors", {"format": "pt"})

    config = eagle3_config(target, vocab)
    tensors = random_tensors(config, 3)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name].zero_()
    fc = torch.zeros(size, 3 * size)
    fc[:, size : 2 * size] = torch.eye(size)
    tensors["fc.weight"] = fc
    tensors["lm_head.weight"] = torch.empty(vocab, size).index_copy_(0, after[after], embeddings)
    write(head, config, tensors)
    return str(target), str(head)
