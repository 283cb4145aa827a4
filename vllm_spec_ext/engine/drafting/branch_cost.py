# SPDX-License-Identifier: Apache-2.0
"""What a branch of a draft tree costs here, beside its nodes.

A branch is verified as a virtual request of its own (:mod:`..trees`). What that takes depends on
the block size, the context and the machine; it shows in how much longer steps with branches take
than the nodes alone would explain.

approximation: the first branch of a step costs as much as any other.
"""

_FIRST = 0.05  # plain steps
_FIRST_WEIGHT = 12.0  # squared branches that this guess counts as
_MEMORY = 0.98  # what remains of the past after one more step with branches
_FADE = 0.998  # and after one without, so that branches are tried again
_CLIP = 0.5  # plain steps: a pause is no cost


class BranchCost:
    """Running estimate for one engine."""

    def __init__(self) -> None:
        """Start from a guess."""
        self._product = self._square = 0.0  # of branches and what they took; of branches

    @property
    def plain_steps(self) -> float:
        """Of one branch; below 0 where noise says so."""
        return (_FIRST_WEIGHT * _FIRST + self._product) / (_FIRST_WEIGHT + self._square)

    def extra(self, num_branches: int) -> float:
        """What so many branches add to a step, in plain steps."""
        return max(0.0, self.plain_steps) * num_branches

    def observe(self, num_branches: int, unexplained: float) -> None:
        """Learn from a step.

        Args:
            num_branches: Of all drafts that were verified.
            unexplained: What it took beside plain decoding and draft tokens, in plain steps.
        """
        if not num_branches:
            self._product, self._square = _FADE * self._product, _FADE * self._square
            return
        taken = min(_CLIP, max(-_CLIP, unexplained))
        self._product = _MEMORY * self._product + num_branches * taken
        self._square = _MEMORY * self._square + num_branches**2
