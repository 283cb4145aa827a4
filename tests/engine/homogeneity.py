# SPDX-License-Identifier: Apache-2.0
"""Chi-square test of two samples: were they drawn from one distribution?"""

from collections import Counter
from collections.abc import Hashable, Sequence

import torch

_LEAST_EXPECTED = 5.0  # below this the chi-square approximation is poor; such cells are pooled


def same_distribution_p_value(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """p-value of the hypothesis that both samples follow the same distribution.

    Cells in which either sample has an expected count below 5 are pooled into one.
    """
    counts = Counter(first), Counter(second)
    share = len(first) / (len(first) + len(second))
    rows: list[tuple[float, float]] = []
    rest = [0.0, 0.0]
    for cell in set(counts[0]) | set(counts[1]):
        a, b = counts[0][cell], counts[1][cell]
        if (a + b) * min(share, 1 - share) >= _LEAST_EXPECTED:
            rows.append((a, b))
        else:
            rest[0] += a
            rest[1] += b
    if sum(rest):
        rows.append((rest[0], rest[1]))
    statistic = 0.0
    for one, other in rows:
        for found, part in ((one, share), (other, 1 - share)):
            expected = (one + other) * part
            statistic += (found - expected) ** 2 / expected
    freedom = torch.tensor((len(rows) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, half))
