# SPDX-License-Identifier: Apache-2.0
"""Turns what a verified token costs into the confidence that a drafted node needs."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MEMORY = 0.99  # what remains of the past after one more verified draft
_FADE = 0.98  # what remains of it after a step in which no draft could pay off
_PRIOR = 4.0  # nodes that an estimate is trusted with at the start
_LOWEST, _NONE = 0.01, math.inf

# Nodes are told apart by what was promised of them: estimates are off by more the nearer they come
# to certainty.
_BOUNDS = np.array([0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.27, 0.35, 0.45, 0.55, 0.67, 0.8, 0.9, 0.97])
_LEAST = np.concatenate(([_LOWEST], _BOUNDS))  # promise of each class
_MIDDLE = np.sqrt(_LEAST * np.append(_BOUNDS, 1.0))


class NodePayoff:
    """Learns how often nodes are accepted of which so much was promised, over all requests."""

    def __init__(self) -> None:
        """Trust the estimates until they prove wrong."""
        self._tried = np.zeros(len(_LEAST))
        self._accepted = np.zeros(len(_LEAST))
        self._promised = 0.0
        self._pending: dict[str, NDArray[np.float32]] = {}

    def drafted(self, request_id: str, path_probs: NDArray[np.float32]) -> None:
        """Remember what a draft promises.

        Args:
            request_id: Whose draft.
            path_probs: [n] estimated probability that each node is accepted.
        """
        self._pending[request_id] = path_probs

    def verified(self, request_id: str, num_drafted: int, accepted: Sequence[int]) -> None:
        """Compare a draft's promise with what became of it.

        Args:
            request_id: Whose draft.
            num_drafted: Nodes that were verified, the first ones of the draft.
            accepted: Those that were accepted.
        """
        probs = self._pending.pop(request_id, None)
        if probs is None:
            return
        probs = probs[:num_drafted]
        classes = np.searchsorted(_BOUNDS, probs, side="right")
        size = len(_LEAST)
        self._promised = self._promised * _MEMORY + float(probs.sum())
        self._tried = self._tried * _MEMORY + np.bincount(classes, minlength=size)
        newly_accepted = np.bincount(classes[list(accepted)], minlength=size)
        self._accepted = self._accepted * _MEMORY + newly_accepted

    def forget(self, request_id: str) -> None:
        """A request is gone, and with it the outcome of its last draft."""
        self._pending.pop(request_id, None)

    @property
    def trust(self) -> float:
        """Accepted nodes for each one that was promised, over all classes."""
        return (float(self._accepted.sum()) + _PRIOR) / (self._promised + _PRIOR)

    def acceptance(self, path_probs: NDArray[np.float32]) -> NDArray[np.float64]:
        """[n] probability that nodes are accepted of which so much is promised, as learned.

        It never falls where the promise grows, so the order of one drafter's nodes stays.
        """
        usual = np.minimum(_MIDDLE * self.trust, 1.0)
        rates = (self._accepted + _PRIOR * usual) / (self._tried + _PRIOR)
        rates = np.minimum(np.maximum.accumulate(rates), 1.0)
        return np.interp(
            path_probs, np.concatenate(([0.0], _MIDDLE)), np.concatenate(([0.0], rates))
        )

    def fade(self, keep: float) -> None:
        """Trust what was seen less.

        Args:
            keep: Share of the past that remains.
        """
        self._tried, self._accepted = self._tried * keep, self._accepted * keep
        self._promised *= keep

    def confidence(self, min_probability: float) -> float:
        """Estimated path probability from which on nodes pay off; above 1 if none do.

        The one with which the nodes so far would have had the largest payoff: their accepted tokens
        less the cost of verifying them. A class that was seldom tried is estimated from all of
        them, so one without a payoff is tried again when that has been forgotten; a call that finds
        no payoff is a step of forgetting.

        Args:
            min_probability: True acceptance probability at which a verified token's benefit equals
                its cost.
        """
        expected = np.minimum(_MIDDLE * self.trust, 1.0)
        payoff = self._accepted + _PRIOR * expected - min_probability * (self._tried + _PRIOR)
        from_class = np.cumsum(payoff[::-1])[::-1]
        best = int(np.argmax(from_class))
        if from_class[best] >= 0.0:
            return float(_LEAST[best])
        self.fade(_FADE)
        return _NONE
