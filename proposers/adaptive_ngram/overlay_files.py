# SPDX-License-Identifier: Apache-2.0
"""Overlay files of several replicas: a name for each, and one made of all.

A shared overlay is worth keeping, but replicas that save into one file overwrite each other. So
``{replica}`` in ``overlay_file`` stands for a replica when it saves, and for ``merged`` when it
starts; ``vllm-spec corpus merge`` makes that one.
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.atomic import remove_partials
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.adaptive_ngram.overlay import (
    FILE_VERSION,
    KIND,
    SUCCESSORS,
    WAYS,
    OverlayPool,
    bucket_start,
    make_key,
    save_overlay,
)
from vllm_spec_ext.proposers.records import EngineHandle
from vllm_spec_ext.tensor_files import reading

REPLICA = "{replica}"
MERGED = "merged"

_WORD = (1 << 21) - 1
_LONGEST_SAVE_S = 3600.0


def file_to_read(overlay_file: str) -> Path:
    """Where a replica finds what was learned before."""
    return Path(overlay_file.replace(REPLICA, MERGED)).expanduser()


def file_to_save(overlay_file: str) -> Path:
    """Where this process saves; another process, here or on another machine, elsewhere."""
    name = f"{socket.gethostname()}-{os.getpid()}"
    return Path(overlay_file.replace(REPLICA, name)).expanduser()


def may_save(overlay_file: str, engine: EngineHandle) -> bool:
    """Whether this process saves: the first replica, and with ``{replica}`` each of them."""
    return engine.may_write_own_files if REPLICA in overlay_file else engine.may_write_files


def tidy(overlay_file: str) -> None:
    """Delete what was left of it by processes that were killed."""
    path = Path(overlay_file.replace(REPLICA, "*")).expanduser()
    remove_partials(path.parent, path.name, min_age_s=_LONGEST_SAVE_S)


def merge_overlays(paths: Sequence[Path], out: Path) -> int:
    """Write one overlay that knows what all of them know; returns its number of contexts.

    A successor has the largest of its weights: replicas that started from a merged file say again
    what that one knew. What was learned lately stays the youngest.

    approximation: successors of one context get the age of the youngest file that has it, so older
    observations of it count as if they were as young.

    Args:
        paths: Saved overlays, of the same tokenizer and size.
        out: The file to write.

    Raises:
        SpecExtError: A file is damaged or no overlay, or they do not fit together.
    """
    files = [_read(path) for path in paths]
    metadata, first = files[0]
    for path, (other, tensors) in zip(paths, files, strict=True):
        if other != metadata or tensors["keys"].shape != first["keys"].shape:
            raise SpecExtError(
                f"overlay {path}: found {other} and {tensors['keys'].shape[0]} rows, expected "
                f"{metadata} and {first['keys'].shape[0]} as in {paths[0]}; merge overlays of one "
                "tokenizer and one shared_buckets"
            )
    contexts: dict[tuple[int, int], dict[int, float]] = {}
    ages: dict[tuple[int, int], int] = {}
    for _, tensors in files:
        _collect(tensors, contexts, ages)
    pool = OverlayPool(1, len(first["keys"]) // WAYS)
    pool.acquire()
    pool.arrays.clocks[0] = max(int(tensors["clock"][0]) for _, tensors in files)
    for context in sorted(contexts, key=lambda known: (ages[known], known)):
        _insert(pool, context, contexts[context], ages[context])
    save_overlay(out, pool, metadata["tokenizer"], int(metadata["vocab_size"]))
    return pool.rows_used(0)


def _read(path: Path) -> tuple[dict[str, str], dict[str, NDArray]]:
    from safetensors import safe_open

    advice = "leave it out"
    with reading(path, advice, "overlay "), safe_open(str(path), framework="numpy") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if (metadata.get("kind"), metadata.get("version")) != (KIND, FILE_VERSION):
        raise SpecExtError(
            f"{path}: found {metadata.get('kind')} {metadata.get('version')}, expected "
            f"{KIND} {FILE_VERSION}; give files that adaptive_ngram saved as overlay_file"
        )
    return metadata, tensors


def _collect(
    tensors: dict[str, NDArray],
    contexts: dict[tuple[int, int], dict[int, float]],
    ages: dict[tuple[int, int], int],
) -> None:
    generation, clock = int(tensors["generation"][0]), int(tensors["clock"][0])
    (rows,) = np.nonzero(tensors["keys"] >> np.uint64(42) == np.uint64(generation))
    for row in rows:
        key = int(tensors["keys"][row])
        context = key >> 21 & _WORD, key & _WORD
        age = clock - int(tensors["stamps"][row])
        ages[context] = min(age, ages.get(context, age))
        known = contexts.setdefault(context, {})
        for token, weight in zip(tensors["tokens"][row], tensors["weights"][row], strict=True):
            if weight > 0:
                known[int(token)] = max(known.get(int(token), 0.0), float(weight))


def _insert(pool: OverlayPool, context: tuple[int, int], known: dict[int, float], age: int) -> None:
    """Put a context into its bucket; the youngest come first, and find the bucket full last."""
    arrays = pool.arrays
    key = make_key(int(arrays.generations[0]), *context)
    start = bucket_start(key, arrays.keys.shape[1])
    for row in range(start, start + WAYS):
        if not arrays.keys[0, row]:
            break
    else:
        return
    heaviest = sorted(known.items(), key=lambda pair: -pair[1])[:SUCCESSORS]
    arrays.keys[0, row] = key
    arrays.stamps[0, row] = arrays.clocks[0] - age
    for place, (token, weight) in enumerate(heaviest):
        arrays.tokens[0, row, place] = token
        arrays.weights[0, row, place] = weight
