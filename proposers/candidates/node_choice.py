# SPDX-License-Identifier: Apache-2.0
"""How many nodes of each request's tree are drafted: the best ones of all requests together."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def choose(
    paths: Sequence[NDArray[np.float32]],
    min_probability: float,
    fixed_cost: float = 0.0,
    most: int | None = None,
) -> list[int]:
    """[num_requests] nodes of each, the first ones of its tree; none where drafting does not pay.

    A node adds its path probability to the tokens of the step, and costs `min_probability` tokens.

    Args:
        paths: Path probabilities of each request's nodes, best first.
        min_probability: Tokens that one node costs.
        fixed_cost: Tokens that any draft at all costs.
        most: Nodes of all requests together; None = as many as pay.
    """
    # Nodes come best first, so those that pay stand in front.
    counts = [int(np.count_nonzero(one >= min_probability)) for one in paths]
    if most is not None and sum(counts) > most:
        rows = np.repeat(np.arange(len(paths)), counts)
        together = np.concatenate([one[:n] for one, n in zip(paths, counts, strict=True)])
        best = rows[np.argsort(-together, kind="stable")[:most]]
        counts = np.bincount(best, minlength=len(paths)).tolist()
    gain = sum(float(one[:n].sum()) for one, n in zip(paths, counts, strict=True))
    pays = fixed_cost <= 0.0 or gain - min_probability * sum(counts) > fixed_cost
    return counts if pays else [0] * len(paths)


def expected_gain(paths: NDArray[np.float32], min_probability: float) -> float:
    """Tokens that the nodes of one request earn which pay, their cost taken off."""
    return float(np.maximum(paths - min_probability, 0.0).sum())
