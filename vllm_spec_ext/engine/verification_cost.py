# SPDX-License-Identifier: Apache-2.0
"""What one more verified token costs on this machine at this load, measured while serving.

The time of a step that only decodes is fitted as ``a + b * tokens`` with exponentially weighted
least squares. A draft token that is accepted with probability p adds p tokens to the step's yield E
and b to its time T, so it pays if ``p / E > b / T``. On a GPU with idle compute b is near zero and
large trees pay; on a CPU, or in a large batch, only confident tokens do.
"""

from dataclasses import dataclass

_MEMORY = 0.98  # weight of the past after one more step: about the last 50 steps count
_MIN_STEPS = 12  # before that, nothing is said


@dataclass(frozen=True)
class Price:
    """What a draft token must be worth."""

    min_probability: float | None  # acceptance probability at which it pays; None = not known yet
    reason: str


class VerificationCost:
    """Running estimate for one engine."""

    def __init__(self) -> None:
        """Start without knowledge."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._emitted = self._requests = 0.0
        self._num_steps = 0

    def observe(self, num_tokens: int, num_requests: int, num_emitted: int, seconds: float) -> None:
        """Count one step that only decoded.

        Args:
            num_tokens: Tokens that went through the target: one a request, and its draft tokens.
            num_requests: Requests in the step.
            num_emitted: Tokens the step yielded, bonus tokens included.
            seconds: From preparing the inputs to knowing the tokens.
        """
        mean = self.predict(num_tokens)
        if self._num_steps > _MIN_STEPS:
            # While all steps had the same size, a larger one may well take many times as long.
            limit = 50 * self._y / self._weight if mean is None else 4 * mean
            if seconds > limit:
                return  # an outlier: compilation, another process, a pause
        self._num_steps += 1
        for name, value in (
            ("_weight", 1.0),
            ("_x", num_tokens),
            ("_y", seconds),
            ("_xx", num_tokens * num_tokens),
            ("_xy", num_tokens * seconds),
            ("_emitted", num_emitted),
            ("_requests", num_requests),
        ):
            setattr(self, name, _MEMORY * getattr(self, name) + value)

    def _line(self) -> tuple[float, float] | None:
        """``(a, b)`` in seconds; None while all steps had the same size."""
        spread = self._weight * self._xx - self._x * self._x
        if self._num_steps < _MIN_STEPS or spread <= 1e-6 * self._weight * self._xx:
            return None
        slope = max(0.0, (self._weight * self._xy - self._x * self._y) / spread)
        return max(0.0, (self._y - slope * self._x) / self._weight), slope

    def predict(self, num_tokens: int) -> float | None:
        """Expected seconds of a decoding step; None while unknown."""
        line = self._line()
        return None if line is None else line[0] + line[1] * num_tokens

    def price(self, num_requests: int) -> Price:
        """What a draft token must be worth in a batch of this size."""
        line = self._line()
        if line is None:
            return Price(None, f"only {self._num_steps} comparable steps so far")
        tokens_per_request = self._x / self._requests
        total = line[0] + line[1] * tokens_per_request * num_requests
        if total <= 0.0:
            return Price(None, "steps take no measurable time")
        emitted = self._emitted / self._requests * num_requests
        probability = min(1.0, line[1] * emitted / total)
        return Price(
            probability,
            f"a token costs {line[1] * 1e3:.2f} ms of {total * 1e3:.1f} ms that yield "
            f"{emitted:.1f} tokens",
        )
