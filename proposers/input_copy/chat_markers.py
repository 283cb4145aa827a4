# SPDX-License-Identifier: Apache-2.0
"""Find the last user message in a tokenised chat prompt.

The markers around a user message are read off the tokenizer's own chat template: a probe
conversation is rendered, and what stands around the user's words in every position is the marker.
Works for templates that delimit turns with special tokens; for others nothing is found and the
caller falls back to the whole prompt.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_spec_ext.proposers.base import IntArray

_FIRST, _ANSWER, _SECOND = "Qone", "Qtwo", "Qthree"


@dataclass(frozen=True)
class ChatMarkers:
    """Token sequences around a user message, without the white space next to the message."""

    before: tuple[int, ...]
    after: int  # first token behind the message
    space: tuple[int, ...]  # white space between `before` and the message; may be empty

    def last_user_span(self, prompt: IntArray) -> tuple[int, int] | None:
        """Token span ``[start, end)`` of the last user message, None if there is none.

        Args:
            prompt: [n] int32 token ids.
        """
        width = len(self.before)
        if len(prompt) <= width:
            return None
        windows = np.lib.stride_tricks.sliding_window_view(prompt, width)
        hits = np.flatnonzero((windows == np.asarray(self.before)).all(axis=1))
        if not len(hits):
            return None
        start = int(hits[-1]) + width
        space = len(self.space)
        if space and tuple(prompt[start : start + space].tolist()) == self.space:
            start += space
        ends = np.flatnonzero(prompt[start:] == self.after)
        end = start + int(ends[0]) if len(ends) else len(prompt)
        return (start, end) if start < end else None


def _common_prefix(a: str, b: str) -> str:
    size = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return a[: min(len(a), len(b))] if size is None else a[:size]


def find_chat_markers(tokenizer: Any) -> ChatMarkers | None:
    """Read the markers off a Hugging Face tokenizer's chat template.

    Returns:
        None if there is no template, it cannot render the probe, or its markers are not tokens of
        their own (then their ids would depend on the message).
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return None
    turns = [
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template may raise anything; then there are no markers
        return None
    if not all(text.count(word) == 1 for word in (_FIRST, _ANSWER, _SECOND)):
        return None
    head, rest = text.split(_FIRST)
    between, rest = rest.split(_ANSWER)
    again, tail = rest.split(_SECOND)
    before = _common_prefix(head[::-1], again[::-1])[::-1]
    after = _common_prefix(between, tail)
    stripped = before.rstrip()
    encode = lambda piece: tuple(tokenizer.encode(piece, add_special_tokens=False))  # noqa: E731
    before_ids, after_ids = encode(stripped), encode(after.lstrip())
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    if not before_ids or not after_ids or after_ids[0] not in special:
        return None
    if special.isdisjoint(before_ids):
        return None
    return ChatMarkers(before_ids, after_ids[0], encode(before[len(stripped) :]))
