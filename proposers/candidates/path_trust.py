# SPDX-License-Identifier: Apache-2.0
"""How far the probabilities that sources add up to can be trusted, by depth and by request.

Sources that agree are not independent, and a chain that was copied from the wrong place is wrong
for long: the log-odds of :mod:`.calibration` order candidates well, and promise too much for deep
drafts and for texts that are harder than most. So what they promise is compared with what is found:
for each depth and each strength, over all requests, and for each request by itself. The order of a
tree's growth does not depend on it; how much of the tree is drafted does.
"""

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import IntArray

BOUNDS = (-3.5, -2.5, -1.7, -1.0, -0.4, 0.2, 0.8, 1.5, 2.3, 3.2)
"""Of the log-odds that sources add up to."""
DEPTHS = (1, 2, 4)
"""Depth of a token in its draft: up to the first bound, up to the second, …, more."""

_RATE = 0.3  # of learning; AdaGrad
_FIRST_SQUARES = 3.0
_MEMORY = 0.999  # of the sums of squares
_OWN_RATE, _OWN_MEMORY = 0.25, 0.97  # of what is a request's own


class PathTrust:
    """Of one engine."""

    def __init__(self) -> None:
        """Start with what is usual."""
        from vllm_spec_ext.proposers.candidates import path_trust_kernels

        self._kernels = path_trust_kernels
        self.corrections = np.zeros((len(DEPTHS) + 1, len(BOUNDS) + 1))
        self._squares = np.full_like(self.corrections, _FIRST_SQUARES)
        self._biases: dict[str, NDArray[np.float64]] = {}
        self._rates = np.array([_RATE, _MEMORY, _OWN_RATE, _OWN_MEMORY])
        nothing, no_paths = np.zeros(0, np.int32), np.zeros(0, np.float32)
        self.corrected("", nothing, no_paths)  # compile now
        self.learn("", nothing, no_paths, 0, np.zeros(0, np.bool_))
        self.forget("")

    def corrected(
        self, request_id: str, parents: IntArray, paths: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """[n] probability of each path, as far as the sources can be trusted; at most its parent's.

        Args:
            request_id: Whose tree.
            parents: [n], before their children.
            paths: [n] as the sources say.
        """
        found = np.empty(len(paths), np.float32)
        bias = self._biases.get(request_id, np.zeros(2))
        self._kernels.correct(parents, paths, self.corrections, bias, found)
        return found

    def learn(
        self,
        request_id: str,
        parents: IntArray,
        paths: NDArray[np.float32],
        num_drafted: int,
        accepted: NDArray[np.bool_],
    ) -> None:
        """Learn from a draft.

        Args:
            request_id: Whose draft.
            parents: [n], before their children.
            paths: [n] as the sources said.
            num_drafted: Nodes that were verified, the first ones.
            accepted: [n] whether each node was.
        """
        bias = self._biases.setdefault(request_id, np.zeros(2))
        self._kernels.learn(
            parents,
            paths,
            min(num_drafted, len(parents)),
            accepted,
            self.corrections,
            self._squares,
            bias,
            self._rates,
        )

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._biases.pop(request_id, None)
