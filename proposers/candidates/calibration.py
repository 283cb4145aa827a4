# SPDX-License-Identifier: Apache-2.0
"""How much each source's word is worth, learned from what becomes of drafts.

The probability that a candidate is accepted behind an accepted parent is modelled as a logistic sum
over the sources: each adds the log-odds of its class of evidence (:mod:`.evidence`), none if it has
nothing to say, and so does the set of those that agree. So two sources that agree count for more
than one, by as much as they turn out to deserve.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import IntArray
from vllm_spec_ext.proposers.candidates import evidence
from vllm_spec_ext.proposers.candidates.path_trust import PathTrust
from vllm_spec_ext.proposers.candidates.priors import first_log_odds

_RATE = 0.25  # of learning; AdaGrad
_FIRST_SQUARES = 2.0  # what the priors count as
_MEMORY = 0.999  # of the sums of squares: so rates go on to follow the text
_HOPE = 0.4  # log-odds that a class is given the benefit of, for each unit that its rate still has

Evidence = NDArray[np.int16]


@dataclass(frozen=True)
class _Pending:
    """A draft that waits for its outcome."""

    parents: IntArray
    evidence: Evidence
    said: NDArray[np.float32]


class Calibration:
    """Of one engine, over all requests."""

    def __init__(self) -> None:
        """Start with what is usual."""
        from vllm_spec_ext.proposers.candidates import kernels

        self._kernels = kernels
        self.weights = first_log_odds()  # [columns, classes] float64
        self._squares = np.full_like(self.weights, _FIRST_SQUARES)
        self.trust = PathTrust()
        self._pending: dict[str, _Pending] = {}
        self._hopeful: NDArray[np.float64] | None = None  # until something is learned
        self._warm_up()

    @property
    def hopeful(self) -> NDArray[np.float64]:
        """[columns, classes] the weights to search with, higher the less a class was tried.

        What looks too unlikely is not drafted, so it could never turn out to be better. An upper
        bound on what it may deserve has it tried, and falls to the weight with each trial.
        """
        if self._hopeful is None:
            self._hopeful = self.weights + (self.weights != 0.0) * (_HOPE / np.sqrt(self._squares))
        return self._hopeful

    def _warm_up(self) -> None:
        """Compile now: a draft of no verified node teaches nothing."""
        nothing = np.zeros((0, evidence.NUM_COLUMNS), np.int16)
        self.drafted("", np.zeros(0, np.int32), nothing, np.zeros(0, np.float32))
        self.verified("", 0, ())
        self.forget("")

    def drafted(
        self,
        request_id: str,
        parents: IntArray,
        evidence: Evidence,
        said: NDArray[np.float32],
    ) -> None:
        """Remember what spoke for the nodes of a draft.

        Args:
            request_id: Whose draft.
            parents: [n], -1 = the root.
            evidence: [n, columns] classes.
            said: [n] probability of each path, as the sources say.
        """
        self._pending[request_id] = _Pending(parents, evidence, said)

    def verified(self, request_id: str, num_drafted: int, accepted: Sequence[int]) -> None:
        """Learn from a draft.

        Args:
            request_id: Whose draft.
            num_drafted: Nodes that were verified, the first ones of the draft.
            accepted: Those that were accepted.
        """
        draft = self._pending.pop(request_id, None)
        if draft is None:
            return
        self._hopeful = None
        is_accepted = np.zeros(len(draft.parents), np.bool_)
        is_accepted[list(accepted)] = True
        self._kernels.learn(
            self.weights,
            self._squares,
            draft.parents,
            draft.evidence,
            min(num_drafted, len(draft.parents)),
            is_accepted,
            _RATE,
            _MEMORY,
        )
        self.trust.learn(request_id, draft.parents, draft.said, num_drafted, is_accepted)

    def forget(self, request_id: str) -> None:
        """A request is gone, and with it the outcome of its last draft."""
        self._pending.pop(request_id, None)
        self.trust.forget(request_id)
