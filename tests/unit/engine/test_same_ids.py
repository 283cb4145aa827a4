# SPDX-License-Identifier: Apache-2.0
"""Whether two tokenizers mean the same by their ids, and how big the scratch of models is."""

import logging

import pytest

pytest.importorskip("vllm")

from vllm_spec_ext.engine.models.same_ids import difference
from vllm_spec_ext.engine.starting.scratch import check_room, num_scratch_blocks
from vllm_spec_ext.errors import SpecExtError


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


@pytest.mark.parametrize(
    ("tree", "tokens", "requests", "block_size", "expected"),
    [
        (False, 8, 64, None, 0),
        (True, 8, 4, None, 16),
        (True, 8, 64, None, 64),
        (True, 7, 1, None, 7),  # one request may draft a tree of nothing but branches
        (False, 4, 8, 32, 8),  # each request leaves its blocks by one block at most
        (False, 20, 2, 16, 4),
        (False, 4, 272, 16, 16 + 64),  # one in four requests leaves its blocks in a step
        (True, 8, 8, 32, 32 + 8),
    ],
)
def test_scratch_blocks(
    tree: bool, tokens: int, requests: int, block_size: int | None, expected: int
) -> None:
    assert num_scratch_blocks(tree, tokens, requests, block_size) == expected


def test_too_little_room_beside_scratch_blocks() -> None:
    check_room(left=600, available=1000, needed=600, num_blocks=4)
    # vLLM's own message is right where a request would not fit without them either.
    check_room(left=100, available=500, needed=501, num_blocks=4)
    with pytest.raises(SpecExtError, match=r"found 1000 bytes, expected at least 1001: 601 .*4 bl"):
        check_room(left=600, available=1000, needed=601, num_blocks=4)


def test_what_is_much_of_the_kv_cache_is_said(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.spec_ext")
    logger.addHandler(caplog.handler)  # vLLM's loggers hand nothing on
    check_room(left=750 << 20, available=1000 << 20, needed=1 << 20, num_blocks=4)
    assert not caplog.messages
    check_room(left=700 << 20, available=1000 << 20, needed=1 << 20, num_blocks=4)
    logger.removeHandler(caplog.handler)
    (message,) = set(caplog.messages)
    assert "300 of the 1000 MiB of KV cache are set aside for drafts (4 blocks)" in message
