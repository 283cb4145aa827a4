# SPDX-License-Identifier: Apache-2.0
"""Turns what a verified token costs into the confidence that a drafted node needs."""

_MEMORY = 0.99  # what remains of the past after one more verified tree
_PRIOR = 4.0  # accepted tokens that the estimates are trusted with at the start
_LOWEST, _HIGHEST = 0.01, 0.95


class Worth:
    """Learns by how much a proposer's estimates of acceptance are off, over all requests."""

    def __init__(self) -> None:
        """Trust the estimates until they prove wrong."""
        self._expected = self._accepted = 0.0
        self._pending: dict[str, float] = {}

    def drafted(self, request_id: str, expected: float) -> None:
        """Remember what a tree promises: the sum of its nodes' path probabilities."""
        self._pending[request_id] = expected

    def verified(self, request_id: str, num_accepted: int) -> None:
        """Compare a tree's promise with what was accepted of it."""
        expected = self._pending.pop(request_id, None)
        if expected is not None:
            self._expected = self._expected * _MEMORY + expected
            self._accepted = self._accepted * _MEMORY + num_accepted

    def forget(self, request_id: str) -> None:
        """A request is gone, and with it the outcome of its last tree."""
        self._pending.pop(request_id, None)

    @property
    def trust(self) -> float:
        """Accepted tokens for each one that was promised."""
        return (self._accepted + _PRIOR) / (self._expected + _PRIOR)

    def confidence(self, min_probability: float) -> float:
        """Estimated path probability from which on a node pays.

        Args:
            min_probability: True acceptance probability at which a verified token pays.
        """
        return min(_HIGHEST, max(_LOWEST, min_probability / max(self.trust, 1e-3)))
