# SPDX-License-Identifier: Apache-2.0
"""The user's own metric for the distance rule: a file with a table, or an importable function.

* ``.npy`` or ``.safetensors`` (one tensor) of shape [vocab, vocab]: entry [target, draft] is the
  distance of a draft token from the target's choice;
* the same of shape [vocab]: one value a token, the distance is the difference of two values;
* ``module:function``: called with two int64 tensors [n] (target, draft), returns [n] numbers.

Arrays saved by pickle are refused: a metric is data, not code.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.tensor_files import reading

# (target token ids [n] int64, draft token ids [n] int64) -> [n] distances, float
Metric = Callable[[Tensor, Tensor], Tensor]


@dataclass(eq=False)
class TableMetric:
    """Distances read from a table, kept on the device where they are asked for."""

    table: Tensor  # [vocab] or [vocab, vocab] float32

    def __call__(self, target: Tensor, draft: Tensor) -> Tensor:
        """[n] float32 distances; see the module's docstring."""
        if self.table.device != target.device:
            self.table = self.table.to(target.device)
        if self.table.ndim == 1:
            return (self.table[target] - self.table[draft]).abs()
        return self.table[target, draft]


@dataclass(frozen=True, eq=False)
class FunctionMetric:
    """A user's function, its result checked on every call."""

    function: Metric
    name: str

    def __call__(self, target: Tensor, draft: Tensor) -> Tensor:
        """[n] float32 distances."""
        found = self.function(target, draft)
        if not isinstance(found, Tensor) or found.shape != target.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise SpecExtError(
                f"distance function {self.name}: found {shape}, expected a tensor "
                f"{list(target.shape)}; return one distance for each pair of token ids"
            )
        return found.to(torch.float32)


def _read_array(path: Path) -> Tensor:
    if path.suffix == ".npy":
        array = np.load(path, allow_pickle=False)
        if array.dtype.kind not in "fiub":
            raise SpecExtError(f"distance table {path}: found {array.dtype}, expected numbers")
        return torch.from_numpy(array.astype(np.float32))
    from safetensors.torch import load_file

    tensors = load_file(path)
    if len(tensors) != 1:
        names = ", ".join(sorted(tensors)) or "none"
        raise SpecExtError(f"distance table {path}: found tensors {names}; expected exactly one")
    return next(iter(tensors.values())).to(torch.float32)


def _load_function(name: str) -> FunctionMetric:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecExtError(
            f"distance function {name!r} cannot be imported: {error}; "
            "expected 'module:function' on the Python path"
        ) from error
    if not callable(function):
        raise SpecExtError(f"distance function {name!r} is a {type(function).__name__}")
    return FunctionMetric(function, name)


def load_metric(source: str, vocab_size: int | None = None) -> Metric:
    """The metric a user names in the option ``table``.

    Args:
        source: A file or ``module:function``.
        vocab_size: Columns of the target's logits; None skips that check.

    Raises:
        SpecExtError: Cannot be read or imported, or has the wrong shape or values.
    """
    path = Path(source)
    if path.suffix not in (".npy", ".safetensors"):
        if ":" in source:
            return _load_function(source)
        raise SpecExtError(
            f"distance table {source!r}: expected a .npy or .safetensors file or 'module:function'"
        )
    try:
        with reading(path, "write it again", "distance table "):
            table = _read_array(path)
    except SpecExtError:
        raise
    except Exception as error:  # numpy raises many types for a damaged file
        raise SpecExtError(
            f"distance table {path} is damaged, or no array of numbers: {error}; write it again"
        ) from error
    square = table.ndim == 2 and table.shape[0] == table.shape[1]
    if table.ndim != 1 and not square:
        raise SpecExtError(
            f"distance table {path}: found shape {list(table.shape)}, "
            "expected [vocab] or [vocab, vocab]"
        )
    if vocab_size is not None and table.shape[0] != vocab_size:
        raise SpecExtError(
            f"distance table {path}: found {table.shape[0]} tokens, the target has {vocab_size}; "
            "make the table for this model's vocabulary (its logits' width, padding included)"
        )
    if bool((table < 0).any()) and table.ndim == 2:
        raise SpecExtError(f"distance table {path}: found negative distances, expected >= 0")
    return TableMetric(table)
