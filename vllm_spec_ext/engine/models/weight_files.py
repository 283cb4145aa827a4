# SPDX-License-Identifier: Apache-2.0
"""The weight files of a folder: which of them vLLM loads, their size, and the shapes in them."""

import json
import pickle
import zipfile
from pathlib import Path

from vllm.model_executor.model_loader.weight_utils import filter_files_not_needed_for_inference

_INDEX = "model.safetensors.index.json"
_CONSOLIDATED = "consolidated"  # begins the names of Mistral's own files, beside the others


def weight_files(folder: Path) -> list[Path]:
    """What vLLM loads (0.32 ``DefaultModelLoader._prepare_weights``), if it is there."""
    listed = listed_files(folder)
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        names = filter_files_not_needed_for_inference(list(map(str, folder.glob(pattern))))
        files = sorted(map(Path, names))
        usual = [file for file in files if not file.name.startswith(_CONSOLIDATED)]
        found = [file for file in files if file.name in listed] or usual or files
        if found:
            return found
    return []


def listed_files(folder: Path) -> set[str]:
    """Names that an index of shards says; none without one."""
    try:
        weight_map: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        return set(weight_map.values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return set()


def weight_bytes(folder: Path) -> int:
    """Of a folder; 0 where they are not known, as of a name on the Hub."""
    return sum(file.stat().st_size for file in weight_files(folder))


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a folder's weight files; weights are not read.

    Of files that cannot be read so nothing: what is wrong with these, loading says.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        found |= _readable(file) if file.suffix == ".safetensors" else _in_pickle(file)
    return found


def safetensors_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a file; raises what safetensors does."""
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        names = list(opened.keys())
        return {name: tuple(opened.get_slice(name).get_shape()) for name in names}


def _readable(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError

    try:
        return safetensors_shapes(file)
    except (SafetensorError, OSError):
        return {}


def _in_pickle(file: Path) -> dict[str, tuple[int, ...]]:
    import torch

    try:
        # Only the newer of PyTorch's formats can be mapped.
        is_mapped = zipfile.is_zipfile(file)
        weights = torch.load(file, map_location="meta", weights_only=True, mmap=is_mapped)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
        return {}
    named: dict[str, torch.Tensor] = weights if isinstance(weights, dict) else {}
    tensors = {name: each for name, each in named.items() if isinstance(each, torch.Tensor)}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
