# SPDX-License-Identifier: Apache-2.0
"""The mean of a figure over texts, and how far it may be from that of all such texts.

Tokens of one text depend on each other, so a text counts once, whatever its length. The interval is
Student's, as texts are few.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Two-sided, by degrees of freedom from 1 on."""
_T_95_OF_MORE = 2.040  # of 31; with more it is smaller, at last 1.960


@dataclass(frozen=True)
class MeanOfTexts:
    """A mean with its 95 % interval."""

    mean: float
    margin: float  # the interval is mean - margin .. mean + margin; infinite for a single text
    num_texts: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "MeanOfTexts":
        """Of one figure a text.

        Args:
            values: At least one.
        """
        count = len(values)
        if count == 1:
            return cls(values[0], math.inf, 1)
        factor = _T_95[count - 2] if count - 2 < len(_T_95) else _T_95_OF_MORE
        error = statistics.stdev(values) / math.sqrt(count)
        return cls(statistics.fmean(values), factor * error, count)

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {self.margin:.3f} ({self.num_texts} texts)"
