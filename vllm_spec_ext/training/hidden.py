# SPDX-License-Identifier: Apache-2.0
"""Stage 2: the target's hidden states, computed per batch or kept on disk.

The final ones, or those of several layers side by side (:meth:`~.target.Target.hidden`). The cache
holds one row per used token: ``hidden_size * 2`` bytes each and layer in bf16 (1.15 GB for a
million tokens of a 576-wide model). It helps only where the target is much larger than its states.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_spec_ext.atomic import write_bytes
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.tensor_files import reading
from vllm_spec_ext.training.batches import Batch, make_batch, used_lengths
from vllm_spec_ext.training.schema import Training
from vllm_spec_ext.training.shards import TokenData, open_manifest, states_path
from vllm_spec_ext.training.target import Target, pick_dtype
from vllm_spec_ext.training.weights_fingerprint import weights_fingerprint

_SEQUENCES_PER_SHARD = 256

HiddenSource = Callable[[Batch], Tensor]  # -> [n, width], one row per position of the batch
Layers = tuple[int, ...] | None  # as Target.hidden takes them


def live_states(target: Target, layers: Layers = None) -> HiddenSource:
    """Run the target on every batch; gradients flow if its weights ask for them."""

    def states(batch: Batch) -> Tensor:
        device = target.device
        hidden = target.hidden(batch.token_ids.to(device), batch.mask.to(device), layers)
        return hidden[batch.rows.to(device), batch.columns.to(device)]

    return states


def state_width(target: Target, layers: Layers) -> int:
    """Numbers of a position's states."""
    return target.hidden_size * (1 if layers is None else len(layers))


def cache_bytes(data: TokenData, max_length: int, width: int, dtype: torch.dtype) -> int:
    """Disk that a cache of all sequences takes."""
    return int(used_lengths(data, max_length).sum()) * width * dtype.itemsize


def cache_dtype(config: Training, target: Target) -> torch.dtype:
    """Number format of cached states."""
    own: torch.dtype = next(target.model.parameters()).dtype
    return own if config.cache_dtype == "auto" else pick_dtype(config.cache_dtype, target.device)


def write_cache(
    folder: Path,
    target: Target,
    data: TokenData,
    max_length: int,
    *,
    batch_size: int,
    layers: Layers = None,
    dtype: torch.dtype | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Compute the states of all sequences, shard by shard; shards that exist are kept.

    Args:
        folder: Of the cache.
        target: Whose states.
        data: All sequences.
        max_length: Tokens used of each.
        batch_size: Sequences at a time.
        layers: Which states.
        dtype: Number format on disk; None = the target's.
        report: Receives progress lines.

    Raises:
        SpecExtError: The folder holds states of another target, length, format or other layers.
        DiskFullError: All shards before the present one are kept.
    """
    from safetensors.torch import save

    dtype = dtype or next(target.model.parameters()).dtype
    facts = {
        "model": target.name,
        "weights": weights_fingerprint(target.name),
        "dtype": str(dtype),
        "max_length": max_length,
        "data_sha256": data.sha256,
        "layers": None if layers is None else list(layers),
    }
    open_manifest(folder, facts, "delete it, and the states are computed again")
    lengths = used_lengths(data, max_length)
    num_shards = -(-len(data) // _SEQUENCES_PER_SHARD)
    for shard in range(num_shards):
        path = _path(folder, shard)
        if path.exists():
            continue
        numbers = np.arange(
            shard * _SEQUENCES_PER_SHARD, min(len(data), (shard + 1) * _SEQUENCES_PER_SHARD)
        )
        parts: dict[int, Tensor] = {}
        # Alike lengths together: padding costs as much as tokens do.
        by_length = numbers[np.argsort(lengths[numbers], kind="stable")]
        for start in range(0, len(numbers), batch_size):
            some = by_length[start : start + batch_size]
            batch = make_batch(data, some, 1, max_length)
            with torch.no_grad():
                hidden = target.hidden(
                    batch.token_ids.to(target.device), batch.mask.to(target.device), layers
                )
            for number, row, mask in zip(some.tolist(), hidden, batch.mask.bool(), strict=True):
                parts[number] = row[mask.to(row.device)].to("cpu", dtype)
        states = torch.cat([parts[number] for number in numbers.tolist()])
        write_bytes(path, save({"hidden": states}))
        report(f"hidden states: shard {shard + 1} of {num_shards}")


def cached_states(
    folder: Path, target: Target, data: TokenData, max_length: int, layers: Layers = None
) -> HiddenSource:
    """Read states that :func:`write_cache` wrote; files are mapped, not loaded."""
    return _stored_states(
        target,
        state_width(target, layers),
        lambda shard: _path(folder, shard),
        _SEQUENCES_PER_SHARD,
        used_lengths(data, max_length),
        np.zeros(len(data), np.int64),
        "delete it and run again",
    )


def has_recorded_states(data: TokenData) -> bool:
    """Whether the states of all continuations were recorded with the data."""
    shards = range(int(data.manifest.get("num_shards", 0)))
    return bool(shards) and all(states_path(data.folder, i).is_file() for i in shards)


def uses_recorded_states(config: Training, data: TokenData) -> bool:
    """Whether a run trains on recorded states; they lack those of the prompts' own text.

    Raises:
        SpecExtError: It would, but they are another model's.
    """
    if not config.cache_hidden or config.whole_texts or not has_recorded_states(data):
        return False
    recorded, asked = data.manifest.get("model"), config.shown_target
    if recorded is not None and recorded not in (asked, config.model):
        raise SpecExtError(
            f"{data.folder} holds hidden states of {recorded!r}, but the {config.product} are for "
            f"{asked!r}; delete all {data.folder / 'states-*'} files, and they are "
            "computed instead. If the two are the same model, "
            f"give --target-name {recorded}"
        )
    weights, found = data.manifest.get("weights"), weights_fingerprint(config.model)
    if None not in (weights, found) and weights != found:
        raise SpecExtError(
            f"{data.folder} holds hidden states of other weights (fingerprint {weights}) than "
            f"{config.model} has now ({found}); delete all {data.folder / 'states-*'} files, and "
            "they are computed instead"
        )
    return True


def recorded_states(target: Target, data: TokenData) -> HiddenSource:
    """Read the states that were recorded while the data was generated; files are mapped."""
    return _stored_states(
        target,
        target.hidden_size,
        lambda shard: states_path(data.folder, shard),
        int(data.manifest["prompts_per_shard"]),
        np.diff(data.offsets) - data.prompt_lengths,
        data.prompt_lengths - 1,  # the first recorded state is that of the prompt's last token
        "delete all states-* files there, and they are computed instead",
    )


def _stored_states(
    target: Target,
    width: int,
    path_of: Callable[[int], Path],
    per_shard: int,  # sequences in a file
    sizes: NDArray[np.integer[Any]],  # [num_sequences] rows of each sequence
    first_columns: NDArray[np.integer[Any]],  # [num_sequences] position of its first row
    advice: str,
) -> HiddenSource:
    from safetensors import safe_open

    dtype = next(target.model.parameters()).dtype
    files: dict[int, Any] = {}

    def rows_of(number: int) -> Tensor:
        shard, first = divmod(number, per_shard)
        if shard not in files:
            with reading(path_of(shard), advice):
                files[shard] = safe_open(str(path_of(shard)), framework="pt")
                found = tuple(files[shard].get_slice("hidden").get_shape())
            low = shard * per_shard
            expected = (int(sizes[low : low + per_shard].sum()), width)
            if found != expected:
                raise SpecExtError(
                    f"{path_of(shard)} holds states of shape {found}, expected {expected} for "
                    f"{target.name}; {advice}"
                )
        start = int(sizes[number - first : number].sum())
        return files[shard].get_slice("hidden")[start : start + int(sizes[number])]

    def states(batch: Batch) -> Tensor:
        picked = []
        for row, number in enumerate(batch.sequences):
            columns = batch.columns[batch.rows == row] - int(first_columns[number])
            picked.append(rows_of(int(number))[columns])
        return torch.cat(picked).to(target.device, dtype)

    return states


def _path(folder: Path, shard: int) -> Path:
    return folder / f"hidden-{shard:05d}.safetensors"
