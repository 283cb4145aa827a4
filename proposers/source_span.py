# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt lie between two pieces of text."""

from typing import Any

from vllm_spec_ext.errors import RequestOptionError
from vllm_spec_ext.proposers.base import IntArray


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
    ids = prompt.tolist()
    text = tokenizer.decode(ids)
    last = text.rfind(closing)
    first = text.rfind(opening, 0, max(last, 0))
    if last < 0 or first < 0:
        missing = closing if last < 0 else opening
        raise RequestOptionError(
            "source_markers",
            f"{missing!r} does not occur in the prompt"
            + ("" if last < 0 else f" before the last {closing!r}")
            + "; expected two texts that enclose the source",
        )
    start = _first_token_at(ids, first + len(opening), tokenizer)
    end = _first_token_at(ids, last, tokenizer)
    if end < len(ids) and len(tokenizer.decode(ids[:end])) > last:
        end -= 1  # the last token runs into the closing marker
    if start >= end:
        raise RequestOptionError(
            "source_markers", f"there is no whole token between {opening!r} and {closing!r}"
        )
    return start, end


def _first_token_at(ids: list[int], character: int, tokenizer: Any) -> int:
    """Smallest i such that the first i tokens decode to at least `character` characters."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(ids[:middle])) >= character:
            high = middle
        else:
            low = middle + 1
    return low
