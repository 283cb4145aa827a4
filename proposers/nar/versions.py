# SPDX-License-Identifier: Apache-2.0
"""The files of a ``nar`` drafter that learns while it serves (``online``), and its versions.

A version is a checkpoint like any other; it has the shape of the drafter that it descends from, and
the very same weights where these make the context's keys and values of the target's states.
"""

import json
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_spec_ext.errors import SpecExtError, shown
from vllm_spec_ext.proposers.models import BlockWeights
from vllm_spec_ext.proposers.nar.layout import (
    CONFIG_NAME,
    EXTRAS_KEY,
    EXTRAS_NAME,
    FILES,
    MASK_NAME,
    WEIGHTS_NAME,
    makes_context,
    read_nar_config,
)
from vllm_spec_ext.tensor_files import check_all_readable

if TYPE_CHECKING:
    from torch import Tensor

_OUTSIDE = ("fc", "hidden_norm", "norm")
_OF_A_LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "block_size", "num_target_layers"),
)
# Other values of these are known to vLLM's class, and not to the trainer's.
_PLAIN: Mapping[str, object] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "is_neox_style": True,
    "logit_scale": 1.0,
    "quantization_config": None,
    "rope_scaling": None,
}
# Raised for damaged files, beside safetensors' own.
_DAMAGED = (
    *(OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError),
    *(struct.error, pickle.UnpicklingError),
)
_FREE = ("torch_dtype", "dtype")  # of the files; what they hold is compared


def drafter_folder(model: str) -> Path:
    """Where a drafter's files are: its folder, or its place in the cache of the Hugging Face Hub.

    Raises:
        SpecExtError: There are none, or of a drafter that cannot be trained.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model, allow_patterns=list(FILES)))
        except Exception as error:
            raise SpecExtError(
                f"the drafter {shown(model)} is neither a folder here nor readable from the "
                f"Hugging Face Hub ({type(error).__name__}: {error})"
            ) from error
    check_all_readable(folder, FILES)
    reason = _why_not(folder)
    if reason is not None:
        raise SpecExtError(
            f"online: {folder}: {reason}; the trainer knows drafters as `vllm-spec train nar` "
            "writes them. Leave online out"
        )
    return folder


def drafter_files(folder: Path) -> Mapping[str, bytes]:
    """Content of the files of a drafter, by name."""
    paths = {name: folder / name for name in FILES}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


class Version(NamedTuple):
    """A version of a drafter."""

    shape: Mapping[str, Any]  # its configuration without what may differ between versions
    weights: BlockWeights


def read_version(folder: Path) -> Version:
    """Read a folder.

    Raises:
        SpecExtError: A file is missing, damaged or cannot be read, or a value is not finite.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_all_readable(folder, FILES)
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        layers = load_file(folder / WEIGHTS_NAME)
        has_extras = read_nar_config(config, folder).has_tensors
        extras = load_file(folder / EXTRAS_NAME) if has_extras else {}
        mask = None
        if (folder / MASK_NAME).is_file():
            given = torch.load(folder / MASK_NAME, weights_only=True, map_location="cpu")
            mask = (given["embedding"] if isinstance(given, dict) else given).reshape(-1)
    except (SafetensorError, *_DAMAGED) as error:
        raise SpecExtError(f"{folder} holds no whole drafter: {error}") from error
    weights = BlockWeights(layers, extras, mask)
    for name, value in _tensors(weights).items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise SpecExtError(f"{folder}: {name} holds values that are not finite")
    return Version(_shape(config), weights)


def check_same_drafter(own: Version, other: Version, folder: Path) -> None:
    """Refuse weights of another shape, and a context that is made in another way.

    Args:
        own: Of the drafter that serves.
        other: What is to take its place.
        folder: Where that is.

    Raises:
        SpecExtError: With the first difference.
    """
    for name in {**own.shape, **other.shape}:
        if own.shape.get(name) != other.shape.get(name):
            raise SpecExtError(
                f"the drafter in {folder} does not match: {CONFIG_NAME} has {name} "
                f"{shown(other.shape.get(name))}, expected {shown(own.shape.get(name))}"
            )
    ours, theirs = _tensors(own.weights), _tensors(other.weights)
    for name in {**ours, **theirs}:
        found, expected = (tuple(of[name].shape) if name in of else None for of in (theirs, ours))
        if found != expected:
            raise SpecExtError(
                f"the drafter in {folder} does not match: {name} has the shape {found}, expected "
                f"{expected}"
            )
        fixed = makes_context(name) or name == "draft_vocab"
        if fixed and not bool((ours[name].double() == theirs[name].double()).all()):
            what = "lists the tokens that are drafted" if name == "draft_vocab" else _CONTEXT
            raise SpecExtError(
                f"the drafter in {folder} cannot take over while requests run: its {name} differs, "
                f"which {what}; serve it from a start of the engine"
            )


_CONTEXT = "makes the keys and values that are in the cache"


def _tensors(weights: BlockWeights) -> "dict[str, Tensor]":
    mask = {} if weights.mask is None else {"mask_embedding": weights.mask}
    return {**weights.layers, **weights.extras, **mask}


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in config.items() if name not in _FREE}
    if isinstance(told.get(EXTRAS_KEY), dict):
        told[EXTRAS_KEY] = {n: v for n, v in told[EXTRAS_KEY].items() if n != "training"}
    return told


def _why_not(folder: Path) -> str | None:
    """Why the trainer cannot train a drafter; None if it can."""
    from safetensors import SafetensorError, safe_open

    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        with safe_open(str(folder / WEIGHTS_NAME), framework="pt") as opened:
            found = set(opened.keys())
    except (OSError, ValueError, SafetensorError) as error:
        return f"found no readable {CONFIG_NAME} and {WEIGHTS_NAME} ({error})"
    if not isinstance(config, dict):
        return f"found {shown(config)} in {CONFIG_NAME}, expected an object"
    own = config.get("dflash_config")
    if not isinstance(own, dict) or not {"mask_token_id", "target_layer_ids"} <= own.keys():
        return "found no dflash_config with mask_token_id and target_layer_ids"
    missing = [name for name in _SIZES if config.get(name) is None]
    if missing:
        return f"found no {missing[0]} in {CONFIG_NAME}"
    for name, expected in _PLAIN.items():
        if config.get(name, expected) != expected:
            return f"found {name} {shown(config[name])}, expected {shown(expected)}"
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        return f"found rope_type {shown(rope['rope_type'])}, expected 'default'"
    if bool(config.get("is_causal", own.get("causal", False))) != bool(own.get("causal", False)):
        return "found is_causal, expected dflash_config.causal to say the same"
    layers = range(int(config["num_hidden_layers"]))
    known = {f"{name}.weight" for name in _OUTSIDE}
    known |= {f"layers.{i}.{name}.weight" for i in layers for name in _OF_A_LAYER}
    for name in sorted(known ^ found):
        return f"found {'a' if name in found else 'no'} tensor {name}"
    return None
