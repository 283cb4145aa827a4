# SPDX-License-Identifier: Apache-2.0
"""The files of a draft model's checkpoint, read without building the model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_spec_ext.errors import SpecExtError, shown
from vllm_spec_ext.tensor_files import reading

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
_WEIGHTS = "*.safetensors"
_INDEX = "model.safetensors.index.json"
# What only heads on a target's states have (engine/models/eagle_checkpoint.py,
# engine/models/dflash_checkpoint.py).
_HEADS = ("Eagle", "DFlash")
_OF_HEADS = (
    "speculators_model_type",
    "draft_vocab_size",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "dflash_config",
)


def checkpoint_folder(model: str) -> Path:
    """Where a model's files are: its folder, or its place in the cache of the Hugging Face Hub.

    Raises:
        SpecExtError: There are none, or none whose weights can be trained: an EAGLE or DFlash
            head, quantized weights, or weights that are not in safetensors files.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model, allow_patterns=[CONFIG_NAME, _WEIGHTS, _INDEX]))
        except Exception as error:
            raise SpecExtError(
                f"the draft model {shown(model)} is neither a folder here nor readable from the "
                f"Hugging Face Hub ({type(error).__name__}: {error})"
            ) from error
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecExtError(f"cannot read {CONFIG_NAME} in {folder}: {error}") from error
    if not isinstance(config, dict):
        raise SpecExtError(f"{folder / CONFIG_NAME} holds no object, expected a model's settings")
    names = [str(name) for name in config.get("architectures") or ()]
    is_head = any(name.startswith(_HEADS) for name in names) or any(map(config.get, _OF_HEADS))
    if is_head or not any(name.endswith("ForCausalLM") for name in names):
        kind = ", ".join(names) or "no architecture"
        raise SpecExtError(
            f"online: {folder} holds {kind}{' (a head)' * is_head}, expected a causal "
            "language model of its own (...ForCausalLM); heads on a target's states cannot learn "
            "this way. Leave online out"
        )
    if config.get("quantization_config"):
        raise SpecExtError(
            f"online: the weights in {folder} are quantized, expected plain ones, which training "
            "can change; leave online out, or serve the unquantized model"
        )
    files = weight_files(folder)
    if not files:
        raise SpecExtError(
            f"online: no model{_WEIGHTS} in {folder}; save the model again with safetensors"
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise SpecExtError(f"no {missing[0]} in {folder}, which {_INDEX} lists; copy it again")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights: those of an index, else all that are named as they usually are.

    Others may lie beside them: the same weights by other names (``consolidated.safetensors``), or
    adapters.
    """
    try:
        listed = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return sorted(folder.glob(f"model{_WEIGHTS}"))
    return [folder / name for name in sorted(set(map(str, listed)))]


def checkpoint_files(folder: Path) -> Mapping[str, bytes]:
    """Content of the configuration and of the weights, by name."""
    paths = [folder / CONFIG_NAME, *weight_files(folder), *folder.glob(_INDEX)]
    return {path.name: path.read_bytes() for path in sorted(paths)}


def tensor_names(folder: Path) -> set[str]:
    """Of all weights of a folder, in the checkpoint; none of them is read."""
    from safetensors import safe_open

    found: set[str] = set()
    for path in weight_files(folder):
        with safe_open(str(path), framework="pt") as opened:
            found.update(opened.keys())
    return found


def read_tensors(folder: Path) -> "dict[str, Tensor]":
    """All weights of a folder, by their names in the checkpoint, on the CPU.

    Raises:
        SpecExtError: There are none, a file is damaged or cannot be read, or a value is not finite.
    """
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with reading(path, "copy or train the model again"):
            found |= load_file(path)
    if not found:
        raise SpecExtError(f"no model{_WEIGHTS} in {folder}")
    for name, value in found.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise SpecExtError(f"{folder}: {name} holds values that are not finite")
    return found
