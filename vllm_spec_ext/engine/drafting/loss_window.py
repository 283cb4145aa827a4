# SPDX-License-Identifier: Apache-2.0
"""What drafting has lost since the best moment of the last steps."""

from collections import deque

NUM_STEPS = 200


class LossWindow:
    """Running sum of gains and losses; knows how far it is below its highest value in a window.

    Over whatever steps within the window one looks, no more was lost than that.
    """

    def __init__(self) -> None:
        """Nothing was lost yet."""
        self._step = 0
        self._sum = 0.0
        # (step, sum before it), sums falling: the highest that is still in the window comes first.
        self._highest: deque[tuple[int, float]] = deque([(0, 0.0)])

    @property
    def lost(self) -> float:
        """From the best moment of the window until now."""
        return max(0.0, self._highest[0][1] - self._sum)

    def add(self, change: float) -> None:
        """Something was gained (above 0) or lost within this step."""
        self._sum += change

    def end_step(self) -> None:
        """The next step begins."""
        self._step += 1
        while self._highest and self._highest[-1][1] <= self._sum:
            self._highest.pop()
        self._highest.append((self._step, self._sum))
        while self._highest[0][0] <= self._step - NUM_STEPS:
            self._highest.popleft()

    def scale(self, factor: float) -> None:
        """Count in another unit from now on."""
        self._sum *= factor
        self._highest = deque((step, value * factor) for step, value in self._highest)
