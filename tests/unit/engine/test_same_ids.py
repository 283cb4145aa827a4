# SPDX-License-Identifier: Apache-2.0
"""Whether two tokenizers mean the same by their ids."""

import pytest

pytest.importorskip("vllm")

from vllm_spec_ext.engine.models.same_ids import difference


class Letters:
    """A tokenizer of single letters; unknown ones are id 0."""

    def __init__(self, letters: str) -> None:
        self.vocab = {letter: index for index, letter in enumerate(letters)}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [self.vocab.get(letter, 0) for letter in text]


class Pairs(Letters):
    """The same vocabulary, but it splits otherwise."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return super().encode(text[::2], add_special_tokens=False)


def test_a_vocabulary_that_goes_on_is_the_same() -> None:
    assert difference(Letters("_abc"), Letters("_abc")) is None
    assert difference(Letters("_abc"), Letters("_abcdef")) is None
    assert difference(Letters("_abcdef"), Letters("_abc")) is None


def test_other_ids_are_shown() -> None:
    found = difference(Letters("_abcd"), Letters("_bacdef"))
    assert found is not None
    assert "2 of 5 ids mean something else (id 1 is 'a' to the draft, 'b' to the target)" in found


def test_other_splits_are_found() -> None:
    found = difference(Pairs("_abc"), Letters("_abc"))
    assert found is not None
    assert "splits text in other places" in found
