# SPDX-License-Identifier: Apache-2.0
"""The adaptive overlay: a fixed-size table of what was seen lately, which forgets.

A 4-way set-associative table of rows; a row is a context (two tokens, or the sentinel and one)
with up to 8 successors. Weights halve every ``half_life`` learned tokens, lazily. A full row gives
up its lightest successor, a full bucket its least recently updated row. Nothing is allocated after
construction, so memory stays constant for ever. A slot's generation is part of its keys: freeing
a slot only raises the generation, which empties all its rows at once.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.atomic import whole_file
from vllm_spec_ext.compiled import kernel
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import check_fingerprint
from vllm_spec_ext.tensor_files import reading

WAYS = 4
SUCCESSORS = 8
LAST_GENERATION = (1 << 22) - 1
FILE_VERSION = "1"
KIND = "adaptive_ngram.overlay"
_OWNERS_ALONE = 0o600  # it holds what people wrote

_OPTION = "overlay_file "
_AGAIN = "delete the file or choose another overlay_file"
_FIX = f"{_AGAIN.capitalize()}."


class OverlayArrays(NamedTuple):
    """The tables of all slots as the kernels take them."""

    keys: NDArray[np.uint64]  # [slots, rows] generation << 42 | w1 << 21 | w2
    stamps: NDArray[np.int64]  # [slots, rows] clock at the last update
    tokens: NDArray[np.int32]  # [slots, rows, 8]
    weights: NDArray[np.float32]  # [slots, rows, 8] as of the stamp; 0 = free
    clocks: NDArray[np.int64]  # [slots] tokens learned
    generations: NDArray[np.int64]  # [slots] from 1; a free row has another one
    evictions: NDArray[np.int64]  # [slots] rows pushed out since the slot was acquired


@kernel
def make_key(generation: int, w1: int, w2: int) -> np.uint64:
    """Pack a context; all three parts fit their bits."""
    return np.uint64((generation << 42) | (w1 << 21) | w2)


@kernel
def bucket_start(key: np.uint64, num_rows: int) -> int:
    """First row of a key's bucket (Fibonacci hashing; num_rows is a power of two)."""
    mixed = (key ^ (key >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    return int((mixed >> np.uint64(33)) & np.uint64(num_rows // 4 - 1)) * 4


@kernel
def find_row(arrays: OverlayArrays, slot: int, w1: int, w2: int) -> int:
    """Row index of a context in a slot, or -1."""
    key = make_key(arrays.generations[slot], w1, w2)
    start = bucket_start(key, arrays.keys.shape[1])
    for row in range(start, start + 4):
        if arrays.keys[slot, row] == key:
            return row
    return -1


@kernel
def decay_factor(age: int, half_life: float) -> float:
    """What is left of a weight after ``age`` learned tokens; half_life 0 keeps all."""
    if half_life <= 0.0 or age <= 0:
        return 1.0
    return 0.5 ** (age / half_life)


@kernel
def add(
    arrays: OverlayArrays,
    slot: int,
    w1: int,
    w2: int,
    token: int,
    half_life: float,
    increment: float,
    cap: float,
) -> None:
    """Record one observation of ``token`` after the context (w1, w2), at the slot's clock."""
    generation = arrays.generations[slot]
    now = arrays.clocks[slot]
    row = find_row(arrays, slot, w1, w2)
    if row < 0:
        key = make_key(generation, w1, w2)
        start = bucket_start(key, arrays.keys.shape[1])
        row = start
        oldest = now + 1
        for way in range(start, start + 4):
            stamp = arrays.stamps[slot, way]
            if np.int64(arrays.keys[slot, way] >> np.uint64(42)) != generation:
                stamp = -1  # free
            if stamp < oldest:
                oldest = stamp
                row = way
        if oldest >= 0:
            arrays.evictions[slot] += 1
        arrays.keys[slot, row] = key
        for place in range(8):
            arrays.weights[slot, row, place] = 0.0
    else:
        factor = decay_factor(now - arrays.stamps[slot, row], half_life)
        if factor < 1.0:
            for place in range(8):
                arrays.weights[slot, row, place] *= factor
    arrays.stamps[slot, row] = now
    lightest = 0
    for place in range(8):
        weight = arrays.weights[slot, row, place]
        if weight > 0.0 and arrays.tokens[slot, row, place] == token:
            arrays.weights[slot, row, place] = min(weight + increment, cap)
            return
        if weight < arrays.weights[slot, row, lightest]:
            lightest = place
    arrays.tokens[slot, row, lightest] = token
    arrays.weights[slot, row, lightest] = min(increment, cap)


@kernel
def learn(
    arrays: OverlayArrays,
    slot: int,
    tokens: NDArray[np.int32],
    start: int,
    vocab_size: int,
    bigrams: bool,
    half_life: float,
    increment: float,
    cap: float,
) -> int:
    """Learn ``tokens[start:]``, each with its one and two predecessors.

    Args:
        arrays: The tables.
        slot: Which table.
        tokens: [n] int32 the request's tokens; ids outside the vocabulary are skipped.
        start: First position to learn; its predecessors are context only.
        vocab_size: Also the sentinel of one-token contexts.
        bigrams: Learn one-token contexts, too.
        half_life: In learned tokens; 0 = for ever.
        increment: Weight of one observation.
        cap: Highest weight of a successor.

    Returns:
        Number of tokens learned.
    """
    learned = 0
    for place in range(max(start, 1), len(tokens)):
        token = tokens[place]
        w2 = tokens[place - 1]
        if token < 0 or token >= vocab_size or w2 < 0 or w2 >= vocab_size:
            continue
        arrays.clocks[slot] += 1
        learned += 1
        if place >= 2:
            w1 = tokens[place - 2]
            if 0 <= w1 < vocab_size:
                add(arrays, slot, w1, w2, token, half_life, increment, cap)
        if bigrams:
            add(arrays, slot, vocab_size, w2, token, half_life, increment, cap)
    return learned


class OverlayPool:
    """A preallocated pool of overlays; memory is only touched where something is learned."""

    def __init__(self, num_slots: int, num_buckets: int) -> None:
        """Reserve the tables.

        Args:
            num_slots: Number of overlays.
            num_buckets: Buckets of four rows in each, a power of two.
        """
        rows = num_buckets * WAYS
        self.arrays = OverlayArrays(
            keys=np.zeros((num_slots, rows), np.uint64),
            stamps=np.zeros((num_slots, rows), np.int64),
            tokens=np.zeros((num_slots, rows, SUCCESSORS), np.int32),
            weights=np.zeros((num_slots, rows, SUCCESSORS), np.float32),
            clocks=np.zeros(num_slots, np.int64),
            generations=np.zeros(num_slots, np.int64),
            evictions=np.zeros(num_slots, np.int64),
        )
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_bytes(self) -> int:
        """Reserved bytes; constant."""
        return sum(array.nbytes for array in self.arrays)

    def acquire(self) -> int | None:
        """An empty overlay, or None when all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.clear(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give an overlay back; its contents are unreachable from here on."""
        self.clear(slot)
        self._free.append(slot)

    def clear(self, slot: int) -> None:
        """Empty an overlay in constant time."""
        if self.arrays.generations[slot] >= LAST_GENERATION:
            self.arrays.keys[slot] = 0  # the counter starts over: old keys must not come alive
            self.arrays.generations[slot] = 0
        self.arrays.generations[slot] += 1
        self.arrays.clocks[slot] = 0
        self.arrays.evictions[slot] = 0

    def rows_used(self, slot: int) -> int:
        """Number of contexts in an overlay; reads the whole table."""
        generation = np.uint64(self.arrays.generations[slot])
        return int((self.arrays.keys[slot] >> np.uint64(42) == generation).sum())


def save_overlay(path: Path, pool: OverlayPool, fingerprint: str, vocab_size: int) -> None:
    """Write slot 0 of a pool (of requests without a salt) to a safetensors file, atomically.

    Args:
        path: The file.
        pool: The pool of shared overlays.
        fingerprint: Of the tokenizer whose ids are stored.
        vocab_size: The sentinel in the keys.
    """
    write_overlay(path, overlay_copy(pool), fingerprint, vocab_size)


def overlay_copy(pool: OverlayPool) -> dict[str, NDArray[Any]]:
    """Slot 0 of a pool as it is now."""
    arrays = pool.arrays
    tensors: dict[str, NDArray[Any]] = {
        name: getattr(arrays, name)[0].copy() for name in ("keys", "stamps", "tokens", "weights")
    }
    tensors["clock"] = arrays.clocks[:1].copy()
    tensors["generation"] = arrays.generations[:1].copy()
    return tensors


def write_overlay(
    path: Path, tensors: dict[str, NDArray[Any]], fingerprint: str, vocab_size: int
) -> None:
    """Write what :func:`overlay_copy` gave; arguments as :func:`save_overlay`.

    Raises:
        OSError: The file is as it was.
    """
    from safetensors.numpy import save

    data = save(
        tensors,
        metadata={
            "kind": KIND,
            "version": FILE_VERSION,
            "tokenizer": fingerprint,
            "vocab_size": str(vocab_size),
        },
    )
    with whole_file(path, _OWNERS_ALONE) as file:
        file.write(data)


def check_overlay(path: Path, fingerprint: str, vocab_size: int, num_buckets: int) -> None:
    """Refuse a saved overlay that another engine made, or a damaged one; reads no table.

    Args:
        path: The file.
        fingerprint: Of this engine's tokenizer.
        vocab_size: The sentinel in its keys.
        num_buckets: Of the overlays here.

    Raises:
        SpecExtError: It cannot be used.
    """
    from safetensors import safe_open

    if path.is_dir():
        raise SpecExtError(f"overlay_file {path} is a folder, expected a file. {_FIX}")
    with reading(path, _AGAIN, _OPTION), safe_open(str(path), framework="numpy") as file:
        metadata = file.metadata() or {}
        names = list(file.keys())
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    found = (metadata.get("kind"), metadata.get("version"), metadata.get("vocab_size"))
    expected = (KIND, FILE_VERSION, str(vocab_size))
    if found != expected:
        raise SpecExtError(f"overlay {path}: found {found}, expected {expected}. {_FIX}")
    check_fingerprint(metadata.get("tokenizer", ""), fingerprint, f"overlay {path}", _FIX)
    num_rows, found_rows = num_buckets * WAYS, shapes.get("keys", ())
    if found_rows != (num_rows,):
        raise SpecExtError(
            f"overlay {path}: found keys of shape {list(found_rows)}, expected [{num_rows}]; "
            f"shared_buckets must be as it was when the file was saved. {_FIX}"
        )


def load_overlay(path: Path, pool: OverlayPool, fingerprint: str, vocab_size: int) -> None:
    """Read a saved overlay into slot 0 of a pool; arguments as :func:`save_overlay`.

    Raises:
        SpecExtError: Damaged, of another tokenizer, vocabulary, version or size.
    """
    from safetensors.numpy import load_file

    arrays = pool.arrays
    check_overlay(path, fingerprint, vocab_size, arrays.keys.shape[1] // WAYS)
    with reading(path, _AGAIN, _OPTION):
        tensors = load_file(path)
    targets = {name: getattr(arrays, name)[0] for name in ("keys", "stamps", "tokens", "weights")}
    targets |= {"clock": arrays.clocks[:1], "generation": arrays.generations[:1]}
    for name, target in targets.items():
        source = tensors.get(name)
        if source is None or source.shape != target.shape or source.dtype != target.dtype:
            shape = "nothing" if source is None else f"{source.dtype} {source.shape}"
            raise SpecExtError(
                f"overlay {path}: found {name} = {shape}, expected {target.dtype} {target.shape}; "
                f"shared_buckets must be as it was when the file was saved. {_FIX}"
            )
    if (tensors["tokens"] < 0).any() or (tensors["tokens"] >= vocab_size).any():
        raise SpecExtError(f"overlay {path}: holds tokens outside the vocabulary. {_FIX}")
    if not np.isfinite(tensors["weights"]).all():
        raise SpecExtError(f"overlay {path}: holds weights that are no numbers. {_FIX}")
    for name, target in targets.items():
        target[...] = tensors[name]
