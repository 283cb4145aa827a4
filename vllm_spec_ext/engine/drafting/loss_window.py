# SPDX-License-Identifier: Apache-2.0
"""What drafting has lost since the best moment of the last steps."""

from collections import deque

NUM_STEPS = 200


class LossWindow:
    """Running sum of gains and losses; knows how far it is below its highest value in a window.

    Over whatever steps within the window one looks, no more was lost than that. In seconds: steps
    of many requests and of few, which take turns while a batch fills and drains, count for what
    they take.
    """

    def __init__(self) -> None:
        """Nothing was lost yet."""
        self._step = 0
        self._sum = 0.0
        # (step, sum before it), sums falling: the highest that is still in the window comes first.
        self._highest: deque[tuple[int, float]] = deque([(0, 0.0)])
        self._plain: deque[float] = deque(maxlen=NUM_STEPS)
        self._plain_sum = 0.0

    @property
    def lost(self) -> float:
        """Seconds from the best moment of the window until now."""
        return max(0.0, self._highest[0][1] - self._sum)

    @property
    def mean_plain(self) -> float | None:
        """Seconds that plain decoding takes for a step of the window; None before the first."""
        return self._plain_sum / len(self._plain) if self._plain else None

    def add(self, seconds: float) -> None:
        """Something was gained (above 0) or lost within this step."""
        self._sum += seconds

    def end_step(self, plain_seconds: float) -> None:
        """The next step begins.

        Args:
            plain_seconds: That plain decoding would have taken for this one.
        """
        self._step += 1
        if len(self._plain) == NUM_STEPS:
            self._plain_sum -= self._plain[0]
        self._plain.append(plain_seconds)
        self._plain_sum += plain_seconds
        while self._highest and self._highest[-1][1] <= self._sum:
            self._highest.pop()
        self._highest.append((self._step, self._sum))
        while self._highest[0][0] <= self._step - NUM_STEPS:
            self._highest.popleft()
