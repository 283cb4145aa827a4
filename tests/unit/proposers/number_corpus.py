# SPDX-License-Identifier: Apache-2.0
"""Corpora of numbers, which are their own token ids."""

from collections.abc import Iterable
from pathlib import Path

from vllm_spec_ext.proposers.corpus.build import BuildSettings, build_store, tokenised
from vllm_spec_ext.proposers.corpus.store import NgramStore


class NumberTokenizer:
    """Numbers separated by spaces; what is no number, or too large, is left out or wraps."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.size)}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(word) % self.size for word in text.split() if word.isdigit()]


def build_corpus(
    folder: Path, documents: Iterable[Iterable[int]], size: int, **settings: int
) -> NgramStore:
    """A store of documents, in a folder."""
    texts = ((" ".join(map(str, ids)), 1) for ids in documents)
    tokenizer = NumberTokenizer(size)
    return build_store(tokenised(texts, tokenizer), tokenizer, folder, BuildSettings(**settings))
