# SPDX-License-Identifier: Apache-2.0
"""Where tokens stand in a prompt's text: as if every prefix of it were decoded, but in one pass."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.errors import RequestOptionError
from vllm_spec_ext.proposers.input_copy import source_span
from vllm_spec_ext.proposers.input_copy.source_span import DecodedPrompt, span_between


class ByteTokenizer:
    """One token a byte, so that characters are split; counts the tokens that it decodes."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return bytes(ids).decode(errors="replace")


@pytest.fixture(params=[4, 7, 256])
def block(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_span, "_BLOCK", request.param)


@pytest.mark.parametrize("seed", range(20))
def test_positions_are_those_of_decoded_prefixes(seed: int, block: None) -> None:
    rng, tokenizer = random.Random(seed), ByteTokenizer()
    text = "".join(rng.choice("ab é漢🙂\u0301\n") for _ in range(60))
    ids = list(text.encode())
    decoded = DecodedPrompt(ids, tokenizer)
    assert decoded.text == text
    lengths = [len(tokenizer.decode(ids[:end])) for end in range(len(ids) + 1)]
    for character in range(len(text) + 1):
        # As bisection would find it; prefixes that end in half a character count a mark or more.
        end, length = decoded.first_token_at(character)
        assert lengths[end] >= character
        assert length >= character
        whole = len(text[:character].encode())
        assert end <= whole
        assert whole - end < 4


def test_bytes_that_are_no_text(block: None) -> None:
    rng, tokenizer = random.Random(0), ByteTokenizer()
    ids = [rng.randrange(256) for _ in range(300)]
    decoded = DecodedPrompt(ids, tokenizer)
    for character in range(len(decoded.text) + 1):
        end, _ = decoded.first_token_at(character)
        assert 0 <= end <= len(ids)
    assert DecodedPrompt([], tokenizer).first_token_at(0) == (0, 0)


def test_each_token_is_decoded_a_few_times_at_most() -> None:
    tokenizer = ByteTokenizer()
    text = "fix <a>" + "some words é to copy. " * 400 + "</a> end"
    prompt = np.array(list(text.encode()), np.int32)
    start, end = span_between(prompt, "<a>", "</a>", tokenizer)
    assert bytes(prompt[start:end].tolist()).decode() == text[7 : text.index("</a>")]
    # Bisection over prefixes decoded half of the prompt some 26 times.
    in_two_blocks = 2 * source_span._BLOCK**2
    assert tokenizer.num_decoded < 1.5 * len(prompt) + in_two_blocks


def test_a_marker_is_quoted_short() -> None:
    with pytest.raises(RequestOptionError, match="does not occur") as error:
        span_between(np.array([97], np.int32), "x" * 100_000, "a", ByteTokenizer())
    assert len(str(error.value)) < 500
