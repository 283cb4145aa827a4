# SPDX-License-Identifier: Apache-2.0
"""The weight files of a folder: which of them vLLM loads, their size, and the shapes in them."""

import glob
import json
import math
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.model_executor.model_loader.weight_utils import filter_files_not_needed_for_inference

if TYPE_CHECKING:
    import torch

# In the order in which vLLM looks for them: Mistral's own files before those beside them.
_PATTERNS = ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt")
_INDEX = {
    "consolidated*.safetensors": "consolidated.safetensors.index.json",
    "*.safetensors": "model.safetensors.index.json",
}
_WIDE = {"F64": 8, "F32": 4}  # bytes of a number, in safetensors' words; all others have fewer


def weight_files(folder: Path) -> list[Path]:
    """What vLLM loads (0.32 ``DefaultModelLoader._prepare_weights``), if it is there."""
    pattern = _pattern(folder)
    files = sorted(folder / name for name in glob.glob(pattern, root_dir=folder))
    if pattern not in _INDEX:
        return list(map(Path, filter_files_not_needed_for_inference(list(map(str, files)))))
    listed = _listed(folder, pattern)
    return [file for file in files if file.name in listed] or files


def missing_files(folder: Path) -> list[str]:
    """Names that the index of what vLLM loads says and that are not there."""
    listed = _listed(folder, _pattern(folder))
    return sorted(name for name in listed if not (folder / name).is_file())


def _pattern(folder: Path) -> str:
    """The first that finds a file; the usual one where none does."""
    found = (pattern for pattern in _PATTERNS if glob.glob(pattern, root_dir=folder))
    return next(found, "*.safetensors")


def _listed(folder: Path, pattern: str) -> set[str]:
    """Names that an index of shards says; none without one."""
    try:
        text = (folder / _INDEX[pattern]).read_text()
        weight_map: dict[str, str] = json.loads(text)["weight_map"]
        return set(weight_map.values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return set()


def weight_bytes(folder: Path, itemsize: int) -> int:
    """What the weights in a folder take; 0 where they are not known, as of a name on the Hub.

    Args:
        folder: With the files.
        itemsize: Bytes of a number that the model computes with; wider ones are loaded as these.
    """
    return sum(_bytes(file, itemsize) for file in weight_files(folder))


def _bytes(file: Path, itemsize: int) -> int:
    from safetensors import SafetensorError, safe_open

    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return size - sum(
            tensor.numel() * max(0, tensor.itemsize - itemsize)
            for tensor in _pickled(file).values()
            if tensor.is_floating_point()
        )
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, no mapping
                part = opened.get_slice(name)
                wide = _WIDE.get(part.get_dtype(), 0)
                size -= math.prod(part.get_shape()) * max(0, wide - itemsize)
    except (SafetensorError, OSError):
        return 0
    return size


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a folder's weight files; weights are not read.

    Of files that cannot be read so nothing: what is wrong with these, loading says.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            found |= _readable(file)
        else:
            found |= {name: tuple(tensor.shape) for name, tensor in _pickled(file).items()}
    return found


def _readable(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            names = list(opened.keys())
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError):
        return {}


def _pickled(file: Path) -> "dict[str, torch.Tensor]":
    """Without their numbers."""
    import torch

    try:
        # Only the newer of PyTorch's formats can be mapped.
        is_mapped = zipfile.is_zipfile(file)
        weights = torch.load(file, map_location="meta", weights_only=True, mmap=is_mapped)
    except Exception:  # a damaged pickle fails in any way
        return {}
    named: dict[str, torch.Tensor] = weights if isinstance(weights, dict) else {}
    return {name: each for name, each in named.items() if isinstance(each, torch.Tensor)}
