# SPDX-License-Identifier: Apache-2.0
"""What the branches of a draft tree cost here, beside their nodes.

A branch is verified as a virtual request of its own (:mod:`..trees`). What that takes depends on
the block size, the context and the machine; it shows in how much longer steps with branches take
than the nodes alone would explain. That a step has branches at all can cost more than all of them:
on a GPU it then gets no full CUDA graph (:mod:`..v2.full_graphs`).

approximation: the cost of a step with branches is 0 until three in a row say otherwise.
"""

_FIRST = 0.05  # plain steps, of a branch
_FIRST_WEIGHT = 12.0  # squared branches that this guess counts as
_MEMORY = 0.98  # what remains of the past after one more step with branches
_FADE = 0.998  # and after one without, so that branches are tried again
_PAUSE = 0.5  # plain steps beside what was expected: a pause is no cost,
_JUMP = 3  # unless so many come in a row
_FOLLOW = 0.1  # of a smaller difference, what is put down to there being branches at all


class BranchCost:
    """Running estimate for one engine."""

    def __init__(self) -> None:
        """Start from a guess."""
        self._of_step = 0.0  # plain steps of any branches at all
        self._product = self._square = 0.0  # of branches and what they took; of branches
        self._surprises: list[float] = []  # in a row, beside what was expected

    def expected(self, num_branches: int) -> float:
        """What so many branches add to a step, in plain steps; below 0 where noise says so."""
        if not num_branches:
            return 0.0
        each = (_FIRST_WEIGHT * _FIRST + self._product) / (_FIRST_WEIGHT + self._square)
        return self._of_step + each * num_branches

    def extra(self, num_branches: int) -> float:
        """The same, at least 0."""
        return max(0.0, self.expected(num_branches))

    def observe(self, num_branches: int, unexplained: float) -> bool:
        """Learn from a step.

        Args:
            num_branches: Of all drafts that were verified.
            unexplained: What it took beside plain decoding and draft tokens, in plain steps.

        Returns:
            Whether that is about what was expected, so that the step says something of nodes.
        """
        if not num_branches:
            self._product, self._square = _FADE * self._product, _FADE * self._square
            self._of_step *= _FADE
            return True
        surprise = unexplained - self.expected(num_branches)
        if abs(surprise) > _PAUSE:
            self._surprises.append(surprise)
            if len(self._surprises) == _JUMP:
                middle = sorted(self._surprises)[_JUMP // 2]
                self._of_step = max(0.0, self._of_step + middle)
                self._surprises.clear()
            return False
        self._surprises.clear()
        if self._of_step:
            self._of_step += _FOLLOW * surprise
        taken = unexplained - self._of_step
        self._product = _MEMORY * self._product + num_branches * taken
        self._square = _MEMORY * self._square + num_branches**2
        return True
