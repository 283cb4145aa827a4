# SPDX-License-Identifier: Apache-2.0
"""Keeps a process within a share of the machine's time."""

import time
from collections.abc import Callable

_LONGEST_REST_S = 30.0


class CpuBudget:
    """Rests after each piece of work for as long as it takes to be within the share again."""

    def __init__(
        self,
        share: float,
        *,
        used: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start now.

        Args:
            share: Cores on average, > 0.
            used: Seconds of processor time of the process so far.
            clock: Seconds.
            sleep: Waits.
        """
        self._share = share
        self._used, self._clock, self._sleep = used, clock, sleep
        self._used_at_start, self._started = used(), clock()

    def rest(self) -> None:
        """Wait until what was used is within the share; at most half a minute at a time."""
        due = (self._used() - self._used_at_start) / self._share
        ahead = due - (self._clock() - self._started)
        if ahead > 0:
            self._sleep(min(ahead, _LONGEST_REST_S))

    def forgive(self) -> None:
        """Idle time buys no later burst, and starting costs no later rest: begin to count anew."""
        self._used_at_start, self._started = self._used(), self._clock()
