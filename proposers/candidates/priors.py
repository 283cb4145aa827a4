# SPDX-License-Identifier: Apache-2.0
"""What sources are usually worth, before an engine has learned it.

Fitted to SmolLM2-135M-Instruct's answers to 150 instructions, problems, functions and sentences to
rewrite or correct, none of them among those that the documentation measures: 64 tokens each, trees
of 32 nodes, three passes over an engine that began empty. A logistic regression of whether a node
behind an accepted one is accepted, in which nodes that are unlikely anyway count less, and which is
held to numbers that 120 other answers gave. Where a class hardly occurred, the number is a guess,
and so are those of answers to the same prompt. Those of drafters came later, in the same way, the
others as they are: 58 answers with the heads of this package and with its block drafter, of 64
tokens, one pass, to none of the questions that the documentation measures. Those of a corpus are
what an engine had learned after 150 answers of 64 tokens, trees of 24 nodes, with 532 other answers
to such prompts as its corpus; but what it says against others is less, by as much as recycled rows
had lost of theirs meanwhile. Beside a drafter they are as without one.
"""

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.candidates.evidence import (
    ANSWERS,
    COPY,
    CORPUS,
    DRAFTER,
    NUM_CLASSES,
    NUM_COLUMNS,
    OTHERS,
    OWN,
    RECYCLED,
    TOGETHER,
)

# A row for each length of a match, a number for each share; as of evidence.py.
_MATCHED = {
    OWN: (
        (0.02, -0.25, 1.2, 0.25, -0.46, -0.71, -3.91),
        (1.09, 0.95, 1.28, -0.07, -0.07, -0.29, -3.58),
        (1.45, 0.98, 1.09, 0.77, 0.22, -2.29, -3.38),
        (1.94, 0.92, 1.37, 0.51, -0.58, -1.96, -3.25),
        (2.09, 2.19, 1.94, 0.25, -0.11, -1.74, -3.14),
        (2.49, 2.15, 2.25, 0.51, -0.55, -1.76, -3.01),
        (3.06, 3.74, 3.9, 0.75, 0.07, -1.59, -2.92),
    ),
    ANSWERS: (
        (-1.17, -0.38, 0.42, -0.33, -0.6, -0.79, -1.49),
        (-0.62, 0.19, 0.83, -0.01, -1, -1.44, -1.82),
        (0.02, 0.69, 1.97, 0.39, -0.84, -1.62, -3.61),
        (0.36, 1.14, 1.81, -0.44, -1.13, -2.24, -3.44),
        (0.82, 2.2, 2.84, -0.12, -0.3, -2.13, -3.36),
        (1.96, 1.35, 1.92, -0.06, -0.63, -1.97, -3.2),
        (1.87, 0.85, 1.28, 0.18, -0.38, -1.81, -3.16),
        (3.5, 3.5, 3.5, 1, 0, -1, -2),
    ),
}
# A number for each probability: recycled or corpus under two tokens, then one; of others the first
# node, then further ones.
_GIVEN = {
    RECYCLED: (
        (-2.49, -2.24, -2.19, -1.98, -1.48, -0.98, -0.7, -0.35, -0.2, -0.05),
        (-2.35, -2.53, -2.14, -1.76, -1.23, -0.89, -0.64, -0.71, -0.61, -0.53),
    ),
    CORPUS: (
        (-2.8, -2.2, -1.8, -1.3, -0.8, -0.6, -0.2, 0.5, 0.6, 1),
        (-2.6, -2.5, -1.9, -1.2, -0.9, -0.6, -0.5, -0.4, -0.3, -0.15),
    ),
    COPY: (
        (-5.16, -4.15, -3.15, -2.29, -1.31, 0.82, 0.44, 0.66, 1.38, 1.97),
        (-5.11, -4.09, -3.09, -2.23, -1.38, -0.54, 0.52, 1, 1.21, 2.53),
    ),
    DRAFTER: (
        (-5.43, -3.7, -2.34, -1.54, -0.97, -0.38, 0.31, 0.73, 1.54, 2.16),
        (-5.15, -4.03, -1.69, -1.23, -0.62, -0.01, 0.55, 0.42, 0.59, 1.52),
    ),
}
# A source that names other tokens: by the length of its match, or as above.
_NAMES_OTHERS = {
    OWN: (-0.27, -0.29, -0.39, -0.92, -1.19, -1.43, -1.88),
    ANSWERS: (-0.26, -0.1, -0.3, -0.43, -0.66, -0.9, -0.45, -2),
    RECYCLED: (-0.9, -0.81),
    CORPUS: (-0.5, -0.45),
    COPY: (0.07, 0.07),
    DRAFTER: (-0.81, -0.54),
}
# Sources that name the token: none of these, own text, answers, both; the same with recycled rows,
# with a corpus, with both of them. Then all of these with a copy, then all so far with a drafter.
_TOGETHER = (
    (0, -0.81, -1.42, 0.62),
    (-0.9, 0.35, 0.58, 1.46),
    (-1.2, 0.3, 0.2, 1.2),
    (0.6, 1.4, 1.5, 2),
    (-1.13, -1.15, 0.2, -0.04),
    (0.05, -0.03, 1.23, 0.83),
    (-0.8, 0, 0.4, 0.4),
    (0.1, 0.5, 1.7, 1.2),
    (-0.75, -0.52, 0.25, -0.11),
    (1.46, 0.39, 2.06, 1.97),
    (-0.75, -0.52, 0.25, -0.11),
    (1.46, 0.39, 2.06, 1.97),
    (0.51, -1.3, 0.19, 0.21),
    (0.4, -0.05, 1.37, 0.77),
    (0.51, -1.3, 0.19, 0.21),
    (0.4, -0.05, 1.37, 0.77),
)


def first_log_odds() -> NDArray[np.float64]:
    """[columns, classes] what each adds."""
    found = np.zeros((NUM_COLUMNS, NUM_CLASSES))
    for source, table in (_MATCHED | _GIVEN).items():
        numbers = np.array(table).ravel()
        found[source, 1 : 1 + len(numbers)] = numbers
        against = _NAMES_OTHERS[source]
        found[source, OTHERS : OTHERS + len(against)] = against
    together = np.array(_TOGETHER).ravel()
    found[TOGETHER, 1 : 1 + len(together)] = together
    return found
