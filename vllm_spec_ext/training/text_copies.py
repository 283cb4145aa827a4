# SPDX-License-Identifier: Apache-2.0
"""The copies that a drafter is shown at every position of a training text, as in serving."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.text_index.copied_tokens import copied_tokens
from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex
from vllm_spec_ext.training.shards import TokenData


class Copies(NamedTuple):
    """Of one text; row t is what is shown beside the hidden state of position t."""

    tokens: NDArray[np.int64]  # [length, count]
    lengths: NDArray[np.int64]  # [length] 0 = no earlier place


class TextCopies:
    """Copies of all texts, found when they are first asked for and kept.

    As in serving, row t uses the text up to x_{t+1}, which the engine knows by then, and nothing
    behind it. So rows do not depend on where a text is cut.
    """

    def __init__(self, data: TokenData, longest: int, count: int) -> None:
        """Nothing is searched yet.

        Args:
            data: All texts.
            longest: Most tokens that are compared.
            count: Tokens for each position.
        """
        self._data, self._longest, self._count = data, longest, count
        self._known: dict[int, Copies] = {}

    @classmethod
    def if_shown(cls, data: TokenData, longest: int, count: int) -> Self | None:
        """As the constructor; None for what is shown no copies (``longest`` 0)."""
        return cls(data, longest, count) if longest else None

    def of(self, number: int) -> Copies:
        """Those of one text."""
        if number not in self._known:
            # Without numba, numpy warns of the overflow that a hash is meant to have.
            with np.errstate(over="ignore"):
                self._known[number] = self._search(number)
        return self._known[number]

    def _search(self, number: int) -> Copies:
        text = self._data.sequence(number).astype(np.int32)
        index = OccurrenceIndex(len(text))
        tokens = np.zeros((len(text), self._count), np.int64)
        lengths = np.zeros(len(text), np.int64)
        index.append(text[:1])
        for row in range(len(text) - 1):
            index.append(text[row + 1 : row + 2])
            tokens[row], lengths[row] = copied_tokens(index, self._longest, self._count)
        return Copies(tokens, lengths)
