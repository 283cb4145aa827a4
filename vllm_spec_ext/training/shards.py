# SPDX-License-Identifier: Apache-2.0
"""Token sequences on disk: numbered safetensors shards and a manifest that says what they are.

A shard holds ``token_ids`` [total] int32, ``offsets`` [n + 1] int64 and ``prompt_lengths`` [n]
int32; sequence i is ``token_ids[offsets[i]:offsets[i + 1]]``. Shards are written atomically, so
one that exists is whole, and generation goes on with the first that is missing.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.atomic import read_json, write_bytes, write_json
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.tensor_files import check_readable

MANIFEST_NAME = "manifest.json"


def shard_path(folder: Path, index: int) -> Path:
    """File of a shard."""
    return folder / f"tokens-{index:05d}.safetensors"


def states_path(folder: Path, index: int) -> Path:
    """File of the hidden states that were recorded while a shard was generated."""
    return folder / f"states-{index:05d}.safetensors"


@dataclass(frozen=True)
class TokenSequence:
    """One training text: a prompt and its continuation."""

    token_ids: Sequence[int]
    prompt_length: int  # tokens of the prompt at the front; at least 1


def write_shard(path: Path, sequences: Sequence[TokenSequence]) -> None:
    """Write sequences as one shard; raises DiskFullError and leaves nothing behind then."""
    from safetensors.numpy import save

    lengths = [len(sequence.token_ids) for sequence in sequences]
    flat = [token for sequence in sequences for token in sequence.token_ids]
    write_bytes(
        path,
        save(
            {
                "token_ids": np.asarray(flat, np.int32),
                "offsets": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(
                    np.int64
                ),
                "prompt_lengths": np.asarray([s.prompt_length for s in sequences], np.int32),
            }
        ),
    )


def write_states(path: Path, states: Sequence[NDArray[np.float32]]) -> None:
    """Write recorded states, [new tokens, hidden_size] a sequence; as :func:`write_shard`."""
    from safetensors.numpy import save

    write_bytes(path, save({"hidden": np.concatenate(states)}))


def open_manifest(
    folder: Path,
    settings: dict[str, Any],
    advice: str = "choose another folder for the data, or delete this one",
) -> None:
    """Start a data folder, or check that an existing one was made with the same settings.

    Args:
        folder: Made if missing.
        settings: Those that an older version did not write down are not compared.
        advice: What to do about other ones.

    Raises:
        SpecExtError: The folder holds data of other settings; they are never mixed.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        write_json(path, settings)
        return
    found = {name: value for name, value in read_json(path).items() if name in settings}
    differing = [name for name, value in found.items() if value != settings[name]]
    if differing:
        parts = "; ".join(f"{n}: {found[n]!r} there, {settings[n]!r} asked" for n in differing)
        raise SpecExtError(f"{folder} holds data made with other settings ({parts}); {advice}")


@dataclass(frozen=True)
class TokenData:
    """All sequences of a data folder, in memory (4 bytes a token)."""

    folder: Path
    manifest: dict[str, Any]
    token_ids: NDArray[np.int32]  # [total]
    offsets: NDArray[np.int64]  # [n + 1]
    prompt_lengths: NDArray[np.int32]  # [n]

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @cached_property
    def sha256(self) -> str:
        """Hash of the content, for whatever is derived from it; 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for array in (self.token_ids, self.offsets, self.prompt_lengths):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]

    def sequence(self, index: int) -> NDArray[np.int32]:
        """Token ids of one sequence, a view."""
        return self.token_ids[self.offsets[index] : self.offsets[index + 1]]


def read_data(folder: Path) -> TokenData:
    """Load every shard of a folder.

    Raises:
        SpecExtError: No data, an unfinished generation, or a damaged shard.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    manifest_path = folder / MANIFEST_NAME
    if not manifest_path.is_file():
        raise SpecExtError(
            f"no {MANIFEST_NAME} in {folder}; expected token shards made by "
            "'vllm-spec train METHOD --stage data --prompts ...'"
        )
    manifest = read_json(manifest_path)
    num_shards = manifest.get("num_shards", 0)
    if not isinstance(num_shards, int):
        raise SpecExtError(
            f"{manifest_path}: num_shards is {num_shards!r}, expected a number; delete the folder "
            "and run the data stage again"
        )
    missing = [i for i in range(num_shards) if not shard_path(folder, i).is_file()]
    if missing or not num_shards:
        raise SpecExtError(
            f"{folder} is unfinished: {len(missing)} of {num_shards} shards are missing; run the "
            "data stage again with the same settings, it goes on where it stopped"
        )
    tokens, lengths, prompts = [], [], []
    for index in range(num_shards):
        path = shard_path(folder, index)
        check_readable(path)
        try:
            part = load(path.read_bytes())
            tokens.append(part["token_ids"])
            lengths.append(np.diff(part["offsets"]))
            prompts.append(part["prompt_lengths"])
        except (SafetensorError, KeyError, ValueError) as error:
            raise SpecExtError(
                f"{path} is damaged ({error}); delete it and run the data stage again"
            ) from error
        if len(lengths[-1]) != len(prompts[-1]) or lengths[-1].sum() != len(tokens[-1]):
            raise SpecExtError(f"{path} contradicts itself; delete it and run the data stage again")
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths), dtype=np.int64)])
    return TokenData(
        folder, manifest, np.concatenate(tokens), offsets.astype(np.int64), np.concatenate(prompts)
    )
