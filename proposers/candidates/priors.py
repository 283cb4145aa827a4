# SPDX-License-Identifier: Apache-2.0
"""What sources are usually worth, before an engine has learned it.

Fitted to SmolLM2-135M-Instruct's answers to 120 instructions, problems, functions and sentences to
rewrite or correct, none of them a benchmark's: 72 tokens each, trees of 32 nodes, one pass over an
engine that began empty. A logistic regression of whether a node behind an accepted one is accepted,
in which nodes that are unlikely anyway count less. Where a class hardly occurred, and for drafters,
the number is a guess.
"""

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.candidates.evidence import (
    ANSWERS,
    COPY,
    DRAFTER,
    NUM_CLASSES,
    NUM_SOURCES,
    OTHERS,
    OWN,
    RECYCLED,
)

# A row for each length of a match, a number for each share; as of evidence.py.
_MATCHED = {
    OWN: (
        (0.31, -0.2, 0.93, 0.49, -0.09, -0.2, -3.95),
        (0.93, 1.53, 1.05, -0.35, 0.41, -1.01, -3.58),
        (1.43, 1.12, 0.85, 0.2, 0.21, -2.24, -3.38),
        (1.89, 0.18, 1.08, 0.08, -0.75, -1.96, -3.25),
        (2.32, 1.82, 1.56, 0.24, -0.14, -1.74, -3.14),
        (2.55, 2.21, 2.16, 0.51, -0.42, -1.69, -3.01),
        (3.39, 4.19, 3.84, 0.75, -0.04, -1.59, -2.92),
    ),
    ANSWERS: (
        (-0.68, -1.04, -0.55, 0.6, 0.16, -0.17, -0.91),
        (0, 0.05, 0.21, -0.23, -0.32, -1.01, -2.17),
        (0.64, 0.64, 0.49, 0.24, -0.88, -2.18, -3.61),
        (1.08, 0.69, 0.72, -0.38, -0.92, -2.07, -3.48),
        (0.95, 1.62, 1.56, -0.29, -0.64, -2.13, -3.36),
        (1.73, 1.29, 1.33, -0.07, -0.83, -1.96, -3.25),
        (2, 0.89, 1.28, 0.18, -0.66, -1.85, -3.16),
    ),
}
# A number for each probability: recycled under two tokens, then one; first node, then further ones.
_GIVEN = {
    RECYCLED: (
        (-3.82, -2.94, -2.75, -1.97, -1.52, -0.85, -0.45, -0.2, 0.12, 0.26),
        (-3.08, -3.17, -2.61, -1.91, -1.49, -0.87, -0.7, -0.68, -0.52, -0.49),
    ),
    COPY: (
        (-5.16, -4.15, -3.15, -2.29, -2.21, 0.57, 0.5, 1.34, 1.63, 1.97),
        (-5.11, -4.09, -3.09, -2.23, -1.38, -0.54, 0.94, 0.73, 1.27, 2.53),
    ),
    DRAFTER: (
        (-5.16, -4.15, -3.15, -2.29, -1.44, -0.63, 0.13, 0.82, 1.44, 1.97),
        (-5.22, -4.2, -3.21, -2.35, -1.51, -0.71, 0.01, 0.64, 1.17, 1.57),
    ),
}
# A source that names other tokens: by the length of its match, or as above.
_NAMES_OTHERS = {
    OWN: (-0.45, -0.29, -0.84, -0.74, -0.85, -1.27, -1.58),
    ANSWERS: (-0.29, -0.4, -0.38, -0.91, -0.46, -0.78, -0.79),
    RECYCLED: (-2.17, -2.36),
    COPY: (-0.26, -0.14),
    DRAFTER: (-1, -1),
}


def first_log_odds() -> NDArray[np.float64]:
    """[sources, classes] what each adds."""
    found = np.zeros((NUM_SOURCES, NUM_CLASSES))
    for source, table in (_MATCHED | _GIVEN).items():
        numbers = np.array(table).ravel()
        found[source, 1 : 1 + len(numbers)] = numbers
        against = _NAMES_OTHERS[source]
        found[source, OTHERS : OTHERS + len(against)] = against
    return found
