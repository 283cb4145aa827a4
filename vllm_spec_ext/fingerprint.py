# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of a tokenizer, kept in every file that stores token ids or was trained on them."""

import hashlib
from typing import Any


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the sorted vocabulary and the special tokens.

    Two tokenizers with the same fingerprint give every id the same meaning; chat templates and
    normalisation rules are not part of it.

    Args:
        tokenizer: Hugging Face tokenizer: ``get_vocab()`` and ``all_special_tokens``.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token_id}\t{token}\n".encode("utf-8", "surrogatepass"))
    for token in sorted({str(token) for token in tokenizer.all_special_tokens}):
        digest.update(f"special\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
