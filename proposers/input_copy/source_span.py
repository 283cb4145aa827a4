# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt lie between two pieces of text."""

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.errors import RequestOptionError, shown
from vllm_spec_ext.proposers.base import IntArray

# Tokens decoded at once. Small, because a decoder may hold the interpreter's lock all the while.
_BLOCK = 256

# Tokens decoded again before a block, so that it reads as it does in the whole: a character has at
# most four tokens, and only the first token of a text loses its leading space.
_CONTEXT = 8

_HALF_CHARACTER = "\ufffd"  # what decoders write for bytes that are no character (yet)


def span_between(prompt: IntArray, opening: str, closing: str, tokenizer: Any) -> tuple[int, int]:
    """Token span of the text between the last `closing` and the `opening` before it.

    Args:
        prompt: [n] int32 token ids.
        opening: Text right before the source.
        closing: Text right behind it; may equal `opening`.
        tokenizer: Has ``decode(ids) -> str``.

    Returns:
        ``[start, end)`` of the tokens that lie wholly between the two.

    Raises:
        RequestOptionError: A text is not in the prompt, or there is no whole token between them.
    """
    decoded = DecodedPrompt(prompt.tolist(), tokenizer)
    text = decoded.text
    last = text.rfind(closing)
    first = text.rfind(opening, 0, max(last, 0))
    if last < 0 or first < 0:
        missing = closing if last < 0 else opening
        raise RequestOptionError(
            "source_markers",
            f"{shown(missing)} does not occur in the prompt"
            + ("" if last < 0 else f" before the last {shown(closing)}")
            + "; expected two texts that enclose the source",
        )
    start, _ = decoded.first_token_at(first + len(opening))
    end, length = decoded.first_token_at(last)
    if end < len(prompt) and length > last:
        end -= 1  # the last token runs into the closing marker
    if start >= end:
        raise RequestOptionError(
            "source_markers",
            f"there is no whole token between {shown(opening)} and {shown(closing)}",
        )
    return start, end


class DecodedPrompt:
    """A prompt's text, and where its tokens stand in it; decodes each token little more than once.

    A token that ends within a character ends, in these counts, behind the half character.
    """

    def __init__(self, ids: list[int], tokenizer: Any) -> None:
        """Decode a prompt block by block."""
        self._ids = ids
        self._tokenizer = tokenizer
        self._starts = [0]  # first token of each block, then the number of tokens
        self._characters = [0]  # number of characters before each block, then of all
        pieces = []
        while self._starts[-1] < len(ids):
            start = self._starts[-1]
            piece, end = self._block(start)
            pieces.append(piece)
            self._starts.append(end)
            self._characters.append(self._characters[-1] + len(piece))
        self.text = "".join(pieces)

    def first_token_at(self, character: int) -> tuple[int, int]:
        """How many tokens it takes to get a number of characters, and how many one gets."""
        block = max(bisect_left(self._characters, character) - 1, 0)
        start = self._starts[block]
        if character <= self._characters[block] or block + 1 == len(self._starts):
            return start, self._characters[block]
        lengths = self._lengths(start, self._starts[block + 1]) + self._characters[block]
        place = int(np.searchsorted(lengths, character))
        return start + place + 1, int(lengths[place])

    def _block(self, start: int) -> tuple[str, int]:
        """Text of the tokens from `start` on, and where they end: behind a whole character."""
        end = min(start + _BLOCK, len(self._ids))
        piece = self._piece(start, end)
        for later in range(end + 1, min(end + 4, len(self._ids)) + 1):
            if not piece.endswith(_HALF_CHARACTER):
                break
            end, piece = later, self._piece(start, later)
        return piece, end

    def _lengths(self, start: int, end: int) -> NDArray[np.int64]:
        """[end - start] characters of the first 1, 2, ... tokens from `start` on."""
        lengths = [len(self._piece(start, last + 1)) for last in range(start, end)]
        # A half character may be more marks than the one that it becomes.
        return np.minimum.accumulate(np.array(lengths, np.int64)[::-1])[::-1]

    def _piece(self, start: int, end: int) -> str:
        context = max(start - _CONTEXT, 0)
        before = self._tokenizer.decode(self._ids[context:start]) if start > context else ""
        return self._tokenizer.decode(self._ids[context:end])[len(before) :]
