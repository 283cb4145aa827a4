# SPDX-License-Identifier: Apache-2.0
"""Keeps a process within a share of the machine's time."""

import time
from collections.abc import Callable


class CpuBudget:
    """Says how long to rest after a piece of work, to be within the share again."""

    def __init__(
        self,
        share: float,
        *,
        used: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start now.

        Args:
            share: Cores on average, > 0.
            used: Seconds of processor time of the process so far.
            clock: Seconds.
        """
        self._share = share
        self._used, self._clock = used, clock
        self._used_at_start, self._started = used(), clock()

    def owed(self) -> float:
        """Seconds to rest until what was used is within the share."""
        due = (self._used() - self._used_at_start) / self._share
        return max(0.0, due - (self._clock() - self._started))

    def forgive(self) -> None:
        """Idle time buys no later burst, and starting costs no later rest: begin to count anew."""
        self._used_at_start, self._started = self._used(), self._clock()
