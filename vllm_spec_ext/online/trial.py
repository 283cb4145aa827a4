# SPDX-License-Identifier: Apache-2.0
"""Which version drafts a step, and whether a new one is better than the one in use.

Versions take turns by step, at random, so that all see the same requests at the same time; no drift
of the traffic can speak for one of them. What is compared is the mean number of draft tokens that
the target accepted in a request's step, steps without a draft included.
"""

import math
import random
from dataclasses import dataclass
from typing import Literal

_KEEP_AT = 1.0  # standard errors that a new version must be ahead
_FALL_AT = 3.0  # standard errors behind the weights of the start at which those come back
_LEAST_GUARDED = 30  # requests' steps of each, before one can fall behind the other
_WINDOW = 4000  # request steps after which the past counts half

Role = Literal["serving", "trial", "guard"]


@dataclass
class Tally:
    """Accepted draft tokens of some requests' steps."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, accepted: int) -> None:
        """One more step."""
        self.count += 1
        self.total += accepted
        self.squares += accepted * accepted

    def fade(self) -> None:
        """Let what was counted so far count half."""
        self.count, self.total, self.squares = self.count / 2, self.total / 2, self.squares / 2

    @property
    def mean(self) -> float | None:
        """Accepted tokens a step; None without any."""
        return self.total / self.count if self.count else None


def standard_errors_ahead(one: Tally, other: Tally) -> float:
    """How far the mean of one is above the other's, in standard errors of the difference.

    0 where nothing can be said yet.
    """
    if one.count < 2 or other.count < 2:
        return 0.0
    means, variance = [], 0.0
    for tally in (one, other):
        mean = tally.total / tally.count
        means.append(mean)
        variance += max(0.0, tally.squares / tally.count - mean * mean) / (tally.count - 1)
    difference = means[0] - means[1]
    if variance <= 0.0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / math.sqrt(variance)


@dataclass(frozen=True)
class Decision:
    """The end of a trial."""

    kept: bool
    reason: str
    before: float
    after: float


class Trial:
    """Roles take turns; a role's version is the caller's business."""

    def __init__(self, trial_steps: int, guard: float, seed: int) -> None:
        """Nothing on trial.

        Args:
            trial_steps: Requests' steps of the new version before a decision.
            guard: Share of the steps of the weights of the start.
            seed: Of the turns.
        """
        self._trial_steps = trial_steps
        self._guard = guard
        self._random = random.Random(seed)
        self._has_trial = False
        self.serving = Tally()
        """Since the version in use came into use."""
        self.guard = Tally()
        """The same time, of the weights of the start."""
        self._before = Tally()
        self._after = Tally()

    def role(self, guards: bool, frozen: bool = False) -> Role:
        """Who drafts the next step.

        Args:
            guards: Whether the version in use has learned anything that is to be guarded.
            frozen: Nothing is tried; a trial that has begun waits.
        """
        drawn = self._random.random()
        if guards and drawn < self._guard:
            return "guard"
        if self._has_trial and not frozen and self._random.random() < 0.5:
            return "trial"
        return "serving"

    def begin(self) -> None:
        """A new version is on trial."""
        self._has_trial = True
        self._before, self._after = Tally(), Tally()

    def cancel(self) -> None:
        """There is nothing on trial."""
        self._has_trial = False

    def changed(self) -> None:
        """Another version is in use."""
        self._has_trial = False
        self.serving, self.guard = Tally(), Tally()

    def count(self, role: Role, accepted: int, *, compared: bool = True) -> None:
        """A request's step that this role drafted.

        Args:
            role: Whose draft it was.
            accepted: Draft tokens.
            compared: Whether a version on trial might have drafted it, too. It does not while all
                is frozen, and traffic that it does not see must not speak for the other one.
        """
        is_compared = self._has_trial and compared
        if role == "guard":
            self.guard.add(accepted)
        elif role == "trial":
            if is_compared:
                self._after.add(accepted)
        else:
            self.serving.add(accepted)
            if is_compared:
                self._before.add(accepted)
        if self.serving.count > _WINDOW:
            self.serving.fade()
            if self.guard.count >= 2 * _LEAST_GUARDED:  # else a small share would never be enough
                self.guard.fade()

    def decision(self) -> Decision | None:
        """Keep the new version or not; None while the trial goes on."""
        if not self._has_trial:
            return None
        if min(self._after.count, self._before.count) < self._trial_steps:
            return None
        ahead = standard_errors_ahead(self._after, self._before)
        before, after = self._before.mean or 0.0, self._after.mean or 0.0
        kept = ahead >= _KEEP_AT
        shown = f"{before:.3f} -> {after:.3f} accepted a step, {ahead:+.1f} standard errors"
        return Decision(kept, shown, before, after)

    def has_fallen(self) -> bool:
        """Whether the version in use is behind the weights of the start."""
        if min(self.guard.count, self.serving.count) < _LEAST_GUARDED:
            return False  # few samples may be alike by chance, and then seem exact
        return standard_errors_ahead(self.guard, self.serving) >= _FALL_AT
