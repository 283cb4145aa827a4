# SPDX-License-Identifier: Apache-2.0
"""What steps with drafts earned, in plain steps: lately, and in the long run.

A draft of five tokens that earns half a step on average loses time in every second step. Hence two
memories. The short one follows what drafts earn now; of drafts that earn, too, it falls below zero
every few dozen steps. The long one tells such bad luck from text on which drafts fail: it is
trusted as long as the failures in a row are as many as it makes likely.

No clock here: gains are given.
"""

import math

# Weight of the last step with drafts in the short memory: the least, and where drafting itself is
# dear, as it is lost in any case.
_LATELY, _LATELY_DEAR = 0.07, 0.15
_TRUSTED = 0.45  # plain steps a step: of what drafts earned lately, what counts once they fail
_LEAST = -0.3  # plain steps a step: of what they lost lately, what counts once they earn
_HOPE = 0.5  # standard errors
_LASTING = 0.02  # weight of the last step with drafts in the long memory
_LASTING_TRUSTED = 0.8  # plain steps a step: the most of it that counts
_ENOUGH = 8  # steps with drafts before it says anything
_UNLIKELY = 0.1  # probability of failures in a row below which it is trusted less


class _Mean:
    """Running mean and variance."""

    def __init__(self) -> None:
        self.mean = self._variance = 0.0
        self._weight = 1.0

    def add(self, value: float, weight: float, before: float) -> None:
        """Count one more.

        Args:
            value: It.
            weight: Of it.
            before: What the mean was, as far as that counts.
        """
        change = value - before
        self.mean = before + weight * change
        self._variance = (1.0 - weight) * (self._variance + weight * change * change)
        self._weight = weight

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(0.5 * self._weight * self._variance)


class GainRecord:
    """Of one engine."""

    def __init__(self) -> None:
        """Nothing was drafted yet."""
        self.num_steps = 0
        self._short, self._long = _Mean(), _Mean()
        self._share_failed = 0.5
        self._failed_in_a_row = 0

    def add(self, gain: float, drafting: float, least_weight: float = 0.0) -> None:
        """Count a step.

        Args:
            gain: What its drafts earned, drafting included.
            drafting: What drafting takes, which is lost if they fail.
            least_weight: Of the step in the short memory.
        """
        self.num_steps += 1
        first = 1.0 / self.num_steps
        # Neither what was earned nor what was lost before outweighs what is seen now for long.
        failed = gain <= 0.0
        before = min(self._short.mean, _TRUSTED) if failed else max(self._short.mean, _LEAST)
        weight = max(first, least_weight, min(_LATELY_DEAR, max(_LATELY, drafting)))
        self._short.add(gain, weight, before)
        before = min(self._long.mean, _LASTING_TRUSTED) if failed else self._long.mean
        weight = max(first, _LASTING)
        self._long.add(gain, weight, before)
        self._share_failed += weight * (failed - self._share_failed)
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0

    @property
    def lately(self) -> float:
        """Plain steps a step."""
        return self._short.mean

    @property
    def hoped(self) -> float:
        """The same, rather too high than too low: few steps say little of what may be tried."""
        hoped = self._short.mean + _HOPE * self._short.error
        return max(hoped, self.lasting) if self.lasting else hoped

    @property
    def lasting(self) -> float:
        """Plain steps a step that drafts earn for sure, whatever the last ones did; 0 = none.

        Less if failures in a row are more than likely: then it is other text.
        """
        if self.num_steps < _ENOUGH:
            return 0.0
        sure = min(_LASTING_TRUSTED, self._long.mean - self._long.error)
        likely = max(self._share_failed, 0.02) ** self._failed_in_a_row
        return max(0.0, sure * min(1.0, likely / _UNLIKELY))
