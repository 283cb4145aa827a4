# SPDX-License-Identifier: Apache-2.0
"""Tokens that are the same word but for case and white space."""

from typing import Any

import numpy as np

from vllm_spec_ext.proposers.base import IntArray

# How byte-level BPE and SentencePiece vocabularies write a leading space.
_SPACE_MARKS = "Ġ▁"


def fold_vocabulary(tokenizer: Any, vocab_size: int) -> IntArray:
    """Map every token id to the smallest id with the same letters.

    Args:
        tokenizer: Has ``get_vocab() -> dict[str, int]``; None folds nothing.
        vocab_size: Ids the model can emit; may exceed the tokenizer's own.

    Returns:
        [vocab_size] int32. White space and special tokens stand for themselves.
    """
    folded = np.arange(vocab_size, dtype=np.int32)
    if tokenizer is None:
        return folded
    special = set(getattr(tokenizer, "all_special_ids", ()))
    first: dict[str, int] = {}
    for text, token in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        word = text.lstrip(_SPACE_MARKS + " ").lower()
        if word and token < vocab_size and token not in special:
            folded[token] = first.setdefault(word, token)
    return folded
