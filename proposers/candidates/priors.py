# SPDX-License-Identifier: Apache-2.0
"""What sources are usually worth, before an engine has learned it.

Learned by :mod:`.calibration` from SmolLM2-135M-Instruct's answers to 60 instructions, problems and
sentences to rewrite, none of them a benchmark's: 96 tokens each, trees of 32 nodes, one pass over
an engine that began empty. Where a class hardly occurred, and for drafters, the number is a guess.
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
        (0.13, 0.1, -0.09, 0.18, 0.07, -1.76, -3.95),
        (0.83, -0.14, 0.46, -0.8, -0.74, -2, -3.58),
        (0.94, 0.53, 0.61, -0.2, -0.37, -2.24, -3.38),
        (1.09, 0.84, 0.98, 0.08, -0.84, -1.96, -3.25),
        (1.8, 1.39, 1.42, 0.24, -0.64, -1.74, -3.14),
        (1.51, 1.8, 2.16, 0.51, -0.3, -1.69, -3.01),
        (2.51, 3.25, 3.71, 0.75, -0.3, -1.59, -2.92),
    ),
    ANSWERS: (
        (-1.08, -1.29, -0.92, -0.34, -0.28, -0.82, -1.98),
        (-0.59, -0.26, -0.04, -0.59, -0.78, -2.01, -3.65),
        (-0.09, 0.12, 0.47, -0.5, -1.21, -2.36, -3.61),
        (0.06, 0.3, 0.46, -0.38, -1.08, -2.07, -3.48),
        (0.77, 0.89, 0.87, -0.22, -0.97, -2.13, -3.36),
        (0.68, 1.03, 1.17, 0.0, -0.83, -1.96, -3.25),
        (0.86, 1.09, 1.28, 0.18, -0.66, -1.85, -3.16),
    ),
}
# A number for each probability: recycled under two tokens, then one; first node, then further ones.
_GIVEN = {
    RECYCLED: (
        (-4.97, -3.99, -3.33, -2, -1.25, -0.46, 0.28, 0.74, 1.09, 1.87),
        (-5.69, -3.8, -3.21, -2.61, -1.2, -0.93, -0.07, -0.39, 0.24, 0.47),
    ),
    COPY: (
        (-5.16, -4.15, -3.15, -2.29, -1.72, 0.63, 0.49, 1.03, 1.21, 1.97),
        (-5.11, -4.09, -3.09, -2.23, -1.38, -0.54, 0.55, 1.19, 1.38, 2.53),
    ),
    DRAFTER: (
        (-5.16, -4.15, -3.15, -2.29, -1.44, -0.63, 0.13, 0.82, 1.44, 1.97),
        (-5.22, -4.2, -3.21, -2.35, -1.51, -0.71, 0.01, 0.64, 1.17, 1.57),
    ),
}
_NAMES_OTHERS = {OWN: -0.65, ANSWERS: -0.18, RECYCLED: -2.02, COPY: -0.16, DRAFTER: -1.0}


def first_log_odds() -> NDArray[np.float64]:
    """[sources, classes] what each adds."""
    found = np.zeros((NUM_SOURCES, NUM_CLASSES))
    for source, table in (_MATCHED | _GIVEN).items():
        numbers = np.array(table).ravel()
        found[source, 1 : 1 + len(numbers)] = numbers
        found[source, OTHERS] = _NAMES_OTHERS[source]
    return found
