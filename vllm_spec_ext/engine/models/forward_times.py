# SPDX-License-Identifier: Apache-2.0
"""What a forward pass of one model takes, by its number of rows; measured while serving."""

import numpy as np

_WEIGHT = 0.1  # of a new measurement
_PAUSE = 4.0  # times the usual; another program had the processor


class ForwardTimes:
    """Running means in classes of row numbers that double from one to the next."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._firsts: dict[int, float] = {}  # bits -> seconds
        self._classes: dict[int, tuple[float, float]] = {}  # bits -> mean rows, mean seconds

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from one pass."""
        key = num_rows.bit_length()
        known = self._classes.get(key)
        if known is None:
            # The first pass of a class includes what the platform prepares by size. Alone it tells
            # nothing: who took it for what a pass takes might never run another.
            first = self._firsts.pop(key, None)
            if first is None:
                self._firsts[key] = seconds
            else:
                self._classes[key] = (float(num_rows), min(first, seconds))
            return
        rows, usual = known
        weight = max(_WEIGHT, 0.5 if seconds < 0.5 * usual else 0.0)
        seconds = min(seconds, _PAUSE * usual)
        self._classes[key] = rows + weight * (num_rows - rows), usual + weight * (seconds - usual)

    def estimate(self, num_rows: int) -> float | None:
        """Seconds of a pass with this many rows; None before two about like it were measured.

        Between classes it is interpolated; no pass takes less than a smaller one. In the next one
        above the largest seconds grow with the rows as they did last. Beyond that nothing is known:
        a pass that is bound by the model's weights takes as long with ten times the rows, and who
        foresaw ten times its time would never run it.
        """
        if not self._classes or num_rows.bit_length() > max(self._classes) + 1:
            return None
        known = [self._classes[key] for key in sorted(self._classes)]
        rows = np.array([row for row, _ in known])
        seconds = np.maximum.accumulate([second for _, second in known])
        if num_rows > rows[-1]:
            slope = np.diff(seconds[-2:]) / np.diff(rows[-2:]) if len(rows) > 1 else seconds / rows
            return float(seconds[-1] + slope[0] * (num_rows - rows[-1]))
        return float(np.interp(num_rows, rows, seconds))
