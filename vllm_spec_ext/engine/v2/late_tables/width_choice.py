# SPDX-License-Identifier: Apache-2.0
"""Whether an asynchronous engine drafts: by what its steps took with drafts and without.

Every request verifies as many tokens there, so there is no length to choose; but where drafts are
not accepted, steps without are quicker. What pays depends on the number of requests, so batches of
similar size are looked at together. Drafts that pay are compared with some plain steps now and
then; those that do not rest, and are tried again.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

TRIAL = 12  # steps
PAYING = 512  # steps with drafts until plain ones are timed again
FIRST_REST, LONGEST_REST = 128, 512  # plain steps until drafts are tried again
LOOKS = 32  # steps between two looks at drafts that pay
EXTENSIONS = 4  # of a trial in which too little could be timed
SETTLED = 2  # steps of a kind before one is timed: those before are still under way
LEAST_TIMED = 5
LEAST_RATIO = 0.98  # of plain decoding's speed; below it drafts rest
REMEMBERED = 128  # steps; answers to more count half
FAR = -9  # no group's
OLD = 0.1  # what answers count from before a rest

Phase = Literal["try", "compare", "draft", "rest"]


def _timed() -> deque[float]:
    return deque(maxlen=2 * TRIAL)


@dataclass
class _Group:
    """Batches of similar size."""

    plain: deque[float] = field(default_factory=_timed)  # seconds of steps
    drafted: deque[float] = field(default_factory=_timed)  # of those that verified drafts
    num_answers: float = 0.0  # of requests, to steps that verified drafts
    num_tokens: float = 0.0  # in them
    phase: Phase = "try"
    left: int = TRIAL  # steps of the phase
    extended: int = 0  # times
    rest: int = FIRST_REST

    @property
    def drafts(self) -> bool:
        return self.phase in ("try", "draft")

    def step(self) -> None:
        """One more step of this size."""
        self.left -= 1
        if self.phase == "draft" and self.left and self.left % LOOKS == 0 and not self._pays():
            self.left = 0
        if self.left:
            return
        timed = self.drafted if self.drafts else self.plain
        unsure = self.phase in ("try", "compare") and len(timed) < LEAST_TIMED
        if unsure and self.extended < EXTENSIONS:
            self.extended, self.left = self.extended + 1, TRIAL
            return
        self.extended = 0
        if self.phase == "rest":
            self.drafted.clear()
            self.num_answers, self.num_tokens = OLD * self.num_answers, OLD * self.num_tokens
            self.phase, self.left = "try", TRIAL
        elif not self._pays():
            self.phase, self.left = "rest", self.rest
            self.rest = min(2 * self.rest, LONGEST_REST)
        elif self.phase == "compare" or (self.phase == "try" and self._is_known()):
            self.phase, self.left = "draft", PAYING
            if self._is_known():
                self.rest = FIRST_REST
        else:
            self.plain.clear()
            self.phase, self.left = "compare", TRIAL

    def _is_known(self) -> bool:
        return min(len(self.plain), len(self.drafted)) >= LEAST_TIMED and self.num_answers > 0

    def _pays(self) -> bool:
        """Also where too little was timed to tell."""
        if not self._is_known():
            return True
        gained = self.num_tokens / self.num_answers
        return gained * median(self.plain) >= LEAST_RATIO * median(self.drafted)


class WidthChoice:
    """Of one engine's scheduler."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Nothing is known.

        Args:
            clock: Seconds.
        """
        self._clock = clock
        self._groups: dict[int, _Group] = {}
        self._last = (0, False, 0)  # group, whether drafts were verified, steps of about that kind
        self._time = 0.0

    def drafts_next(self, num_requests: int, num_verified: int, *, only_decodes: bool) -> bool:
        """Whether the step behind this one verifies drafts; called when this one is scheduled.

        Args:
            num_requests: Of the step.
            num_verified: Draft tokens in it.
            only_decodes: It has no part of a prompt.
        """
        now, before = self._clock(), self._time
        self._time = now
        size = num_requests.bit_length()
        group = self._groups.setdefault(size, _Group())
        verifies = num_verified > 0
        near = abs(size - self._last[0]) <= 1 and verifies == self._last[1]
        same = self._last[2] + 1 if only_decodes and near else 0
        self._last = (size if only_decodes else FAR, verifies, same)
        if same >= SETTLED:
            (group.drafted if num_verified else group.plain).append(now - before)
        if only_decodes:
            group.step()
        return group.drafts

    def interrupted(self) -> None:
        """A step is scheduled whose size never drafts."""
        self._time, self._last = self._clock(), (FAR, False, 0)

    def answered(self, num_requests: int, num_answers: int, num_tokens: int) -> None:
        """A step that verified drafts is over.

        Args:
            num_requests: Of it.
            num_answers: Requests whose drafts were verified.
            num_tokens: That these got.
        """
        group = self._groups.setdefault(num_requests.bit_length(), _Group())
        group.num_answers += num_answers
        group.num_tokens += num_tokens
        if group.num_answers > REMEMBERED * num_requests:
            group.num_answers, group.num_tokens = group.num_answers / 2, group.num_tokens / 2
