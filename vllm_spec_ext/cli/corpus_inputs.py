# SPDX-License-Identifier: Apache-2.0
"""What a corpus is built from: files of text, and folders of a target's answers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import check_fingerprint, tokenizer_fingerprint, tokenizer_vocab_size
from vllm_spec_ext.proposers.corpus.build import Piece, tokenised
from vllm_spec_ext.proposers.corpus.documents import read_documents
from vllm_spec_ext.training.shards import MANIFEST_NAME, TokenData, read_data

_CONTEXT = 2  # tokens of a prompt that are counted with its answer: what answers begin with


def check_input(path: Path) -> None:
    """Raise SpecExtError for what is neither a file nor a folder of answers."""
    if path.is_dir() and not (path / MANIFEST_NAME).is_file():
        raise SpecExtError(
            f"found a folder, expected its files, or a folder of answers with {MANIFEST_NAME}: "
            f"{path}/*"
        )
    if not path.exists():
        raise SpecExtError(f"no such input file: {path}")


def num_bytes(path: Path) -> int:
    """Of a file, or of a folder's shards."""
    files = path.glob("tokens-*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def pieces_of(path: Path, field: str, tokenizer: object) -> Iterator[Piece]:
    """What one input holds.

    Raises:
        SpecExtError: It cannot be read, or was made with another tokenizer.
    """
    if not path.is_dir():
        yield from tokenised(read_documents(path, field), tokenizer)
        return
    data = read_data(path)
    check_fingerprint(
        str(data.manifest.get("tokenizer_fingerprint")),
        tokenizer_fingerprint(tokenizer),
        f"the answers in {path} (of {data.manifest.get('model')})",
        "Give --tokenizer the model that answered.",
    )
    yield list(_answers(data, tokenizer_vocab_size(tokenizer))), num_bytes(path)


def _answers(data: TokenData, vocab_size: int) -> Iterator[NDArray[np.uint64]]:
    """Answers with the last tokens of their prompts; a token that has no name ends one."""
    for index, length in enumerate(data.prompt_lengths.tolist()):
        ids = data.sequence(index)[max(0, length - _CONTEXT) :]
        for part in np.split(ids, np.flatnonzero(ids >= vocab_size)):
            yield part[part < vocab_size].astype(np.uint64)
