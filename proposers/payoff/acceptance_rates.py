# SPDX-License-Identifier: Apache-2.0
"""How often drafts of a kind are accepted, and how long a draft may be to pay off."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MEMORY = 0.99  # how much of the past survives one more draft of the same kind
_FADE = 0.98  # how much of it survives a step in which a draft of that kind could not pay off


class AcceptanceRates:
    """Two rates for each kind of draft: that its first token stands, and that one more does."""

    def __init__(self, priors: Sequence[tuple[float, float]], strength: float = 8.0) -> None:
        """Start from what is usual.

        Args:
            priors: For each kind (rate of the first token, rate of each further one).
            strength: Number of observations that the priors count as.
        """
        self._priors = list(priors)
        self._strength = strength
        # [first: accepted, tried; further: accepted, tried] beyond the prior
        self._counts = [[0.0, 0.0, 0.0, 0.0] for _ in priors]
        self._refused: set[int] = set()  # kinds that could not pay off in this step

    def next_step(self) -> None:
        """Kinds of which not even one token paid off fall back slowly to what is usual.

        So they are tried again some time, no sooner where there are many requests.
        """
        for kind in self._refused:
            self._counts[kind] = [value * _FADE for value in self._counts[kind]]
        self._refused.clear()

    def observe(self, kind: int, num_drafted: int, num_accepted: int) -> None:
        """Learn from one verified draft."""
        if num_drafted <= 0:
            return
        counts = self._counts[kind]
        tried_further = min(num_accepted, num_drafted - 1)
        seen = (float(num_accepted > 0), 1.0, float(max(0, num_accepted - 1)), float(tried_further))
        for i, value in enumerate(seen):
            counts[i] = counts[i] * _MEMORY + value

    def rates(self, kind: int) -> tuple[float, float]:
        """Estimated ``(first, further)`` rates of a kind."""
        first, further = self._priors[kind]
        counts, strength = self._counts[kind], self._strength
        return (
            (counts[0] + first * strength) / (counts[1] + strength),
            (counts[2] + further * strength) / (counts[3] + strength),
        )

    def path_probs(self, kind: int, num_tokens: int) -> NDArray[np.float32]:
        """[num_tokens] probability that each token of a draft of this kind is accepted."""
        first, further = self.rates(kind)
        return (first * further ** np.arange(num_tokens)).astype(np.float32)

    def longest_draft(self, kind: int, min_probability: float, limit: int) -> int:
        """Longest draft whose last token is still accepted with at least that probability."""
        first, further = self.rates(kind)
        if first < min_probability:
            self._refused.add(kind)
            return 0
        if min_probability <= 0.0 or further >= 1.0:
            return limit
        if further <= 0.0:
            return min(1, limit)
        return min(limit, 1 + int(math.log(min_probability / first) / math.log(further)))
