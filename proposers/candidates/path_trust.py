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
from vllm_spec_ext.proposers.candidates.evidence import NUM_COLUMNS
from vllm_spec_ext.proposers.candidates.lookup import Candidates

BOUNDS = (-3.5, -2.5, -1.7, -1.0, -0.4, 0.2, 0.8, 1.5, 2.3, 3.2)
"""Of the log-odds that sources add up to."""
DEPTHS = (1, 2, 4)
"""Depth of a token in its draft: up to the first bound, up to the second, …, more."""

_RATE = 0.3  # of learning; AdaGrad
_FIRST_SQUARES = 3.0
_MEMORY = 0.999  # of the sums of squares
_OWN_RATE, _OWN_MEMORY = 0.25, 0.97  # of what is a request's own
_NO_BIAS = np.zeros(2)


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
        no_evidence = np.zeros((0, NUM_COLUMNS), np.int16)
        tree = Candidates(nothing, nothing, no_paths, no_evidence, no_paths)
        self.best_part("", tree, 0.0, 0.0)  # compile now
        self.learn("", nothing, no_paths, 0, np.zeros(0, np.bool_))
        self.forget("")

    def best_part(
        self, request_id: str, tree: Candidates, node_cost: float, branch_cost: float
    ) -> Candidates:
        """The tree with probabilities as far as the sources can be trusted, likeliest path first.

        Branches that earn less than one costs are left out.

        Args:
            request_id: Whose tree.
            tree: As the sources say.
            node_cost: Tokens that verifying a node costs.
            branch_cost: Tokens that each branch costs beside its nodes.
        """
        parents, tokens, paths, evidence, said = self._kernels.best_part(
            tree.parents,
            tree.tokens,
            tree.said,
            tree.evidence,
            self.corrections,
            self._biases.get(request_id, _NO_BIAS),
            node_cost,
            branch_cost,
        )
        return Candidates(parents, tokens, paths, evidence, said)

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
