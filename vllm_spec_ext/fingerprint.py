# SPDX-License-Identifier: Apache-2.0
"""What identifies a tokenizer: files made of token ids carry it and are refused under another one.

The fingerprint covers the whole vocabulary (added and special tokens included) and how a fixed
probe text is split. The probe stands for merges, normaliser and pre-tokeniser, whose stored form
differs between library versions although the behaviour does not.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from vllm_spec_ext.errors import SpecExtError

PROBE = (
    "The quick brown fox can't jump  over 1234.5 lazy dogs;\n\tdef f(x): return x**2  # naïve\n\n"
    "Ünïcödé ﬁne “quotes” — 東京 привет مرحبا 🙂 ANTIDISESTABLISHMENTARIANISM http://a.b/c?d=e&f=1"
)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id, added tokens included."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""


def fingerprint(vocab: Mapping[str, int], probe_ids: Sequence[int]) -> str:
    """Hash of a vocabulary and of the ids that :data:`PROBE` is split into.

    Args:
        vocab: Token text to id.
        probe_ids: Ids of :data:`PROBE` without special tokens.

    Returns:
        ``"sha256:"`` and 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for token, index in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\x00{token}\x00".encode("utf-8", "surrogatepass"))
    digest.update(b"probe\x00" + ",".join(map(str, probe_ids)).encode())
    return f"sha256:{digest.hexdigest()}"


def tokenizer_fingerprint(tokenizer: object) -> str:
    """Fingerprint of a Hugging Face tokenizer (tens of milliseconds).

    Raises:
        SpecExtError: The object has neither ``get_vocab`` nor ``encode``.
    """
    if not (hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "encode")):
        raise SpecExtError(
            f"cannot fingerprint a tokenizer of type {type(tokenizer).__name__}: expected "
            "get_vocab() and encode(); use a Hugging Face tokenizer"
        )
    known = cast(Tokenizer, tokenizer)
    return fingerprint(known.get_vocab(), known.encode(PROBE, add_special_tokens=False))


def tokenizer_vocab_size(tokenizer: object) -> int:
    """One more than the highest token id, which added tokens may push above ``len(vocab)``."""
    return max(cast(Tokenizer, tokenizer).get_vocab().values()) + 1


def check_fingerprint(found: str, expected: str, what: str, fix: str) -> None:
    """Refuse a file that was made with another tokenizer.

    Args:
        found: Fingerprint in the file.
        expected: Fingerprint of the tokenizer in use.
        what: The file, for the message.
        fix: What the user can do about it.

    Raises:
        SpecExtError: The two differ.
    """
    if found != expected:
        raise SpecExtError(
            f"{what} was made with another tokenizer: found {found[:23]}…, expected "
            f"{expected[:23]}… (the engine's). {fix}"
        )
