# SPDX-License-Identifier: Apache-2.0
"""What sources are usually worth, before an engine has learned it.

Fitted to SmolLM2-135M-Instruct's answers to 155 instructions, problems, functions and sentences to
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
        (0.11, 0.33, 1.28, 0.21, -0.66, -0.79, -3.91),
        (0.94, 1.86, 1.44, 0.01, -0.29, -1.57, -3.58),
        (1.66, 1.63, 0.85, 0.58, -0.5, -2.39, -3.38),
        (2.03, 1.01, 1.1, 0.03, -0.48, -2.05, -3.25),
        (2.25, 1.99, 1.68, 0.24, -0.21, -1.74, -3.14),
        (2.46, 2.08, 2.16, 0.34, -0.22, -1.69, -3.01),
        (3.32, 3.73, 4.55, 0.75, -0.17, -1.59, -2.92),
    ),
    ANSWERS: (
        (-0.85, -0.13, 0.33, -0.16, -0.61, -1.01, -2.3),
        (0.23, 0.62, 1.2, -0.21, -0.82, -1.52, -2.64),
        (0.48, 0.17, 1.16, 0.47, -0.69, -2.24, -3.61),
        (0.84, 0.8, 0.96, -0.44, -0.57, -1.98, -3.48),
        (1.21, 1.44, 1.89, -0.18, -0.69, -2.13, -3.36),
        (1.97, 1.51, 1.6, 0.58, -1.05, -1.96, -3.25),
        (1.4, 1.23, 1.28, 0.18, -0.49, -1.85, -3.16),
    ),
}
# A number for each probability: recycled under two tokens, then one; first node, then further ones.
_GIVEN = {
    RECYCLED: (
        (-3.63, -3.39, -2.35, -1.58, -1.32, -0.8, -0.17, 0, 0.03, -0.39),
        (-3.9, -3.18, -2.24, -2.39, -1.55, -1.07, -0.84, -0.6, -0.22, -1),
    ),
    COPY: (
        (-5.16, -4.15, -3.15, -2.29, -2.67, 0.15, 0.37, 0.69, 1.55, 1.97),
        (-5.11, -4.09, -3.09, -2.23, -1.38, -0.54, 0.45, 0.41, 0.66, 2.53),
    ),
    DRAFTER: (
        (-5.16, -4.15, -3.15, -2.29, -1.44, -0.63, 0.13, 0.82, 1.44, 1.97),
        (-5.22, -4.2, -3.21, -2.35, -1.51, -0.71, 0.01, 0.64, 1.17, 1.57),
    ),
}
# A source that names other tokens: by the length of its match, or as above.
_NAMES_OTHERS = {
    OWN: (-1.15, -1.58, -1.85, -2, -1.89, -1.56, -2.31),
    ANSWERS: (-0.92, -1.12, -1.33, -1.48, -1.62, -1.74, -1.53),
    RECYCLED: (-0.41, -0.62),
    COPY: (-0.55, -0.38),
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
