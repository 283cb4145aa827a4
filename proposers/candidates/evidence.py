# SPDX-License-Identifier: Apache-2.0
"""What speaks for a candidate: a class of strength for each source that names it.

Sources are looked up node by node (the text's own past, earlier answers, recycled rows, a corpus)
or bring a small tree of their own (a copy of the input, a trained drafter). Class 0 is "this source
has nothing to say here", those from :data:`OTHERS` on are "it names other tokens", by how much
speaks for these. Sources are not independent (a copy of the input is found in the text, too), so
which of them name a token together is a column of its own. The arithmetic of classes is in
:mod:`.kernels`, compiled with the search.
"""

OWN, ANSWERS, RECYCLED, CORPUS, COPY, DRAFTER = range(6)
NUM_SOURCES = 6
TOGETHER = NUM_SOURCES
"""The column behind those of the sources: 1, and 2**source for each that names the token."""
NUM_COLUMNS = NUM_SOURCES + 1
NAMES = ("own text", "earlier answers", "recycled", "corpus", "copy")
"""Of the sources in that order; the last one is called what its method is called."""

OTHERS = 64
"""The first class of a token that is not one of those that a source names."""
NUM_CLASSES = 80

LENGTHS = (1, 2, 3, 4, 6, 9, 999)
"""Tokens of a match: up to the first bound, up to the second, …, more."""
SAME_ANSWER = LENGTHS[-1] + 1
"""What counts as the length of a match with an answer to the same prompt, as far into it: longer
than every other."""
LEAST_SAME = 9
"""Tokens that have to agree for that, those of the heading among them: a word that two answers
happen to have in one place says little."""
NUM_SHARES = 7
"""How often the token followed: once in one place; nearly always, in few or many places; at least
0.6, 0.3 or 0.1 of the places; less."""

PROBS = (0.01, 0.03, 0.07, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Bounds of what a model, or a method, gives a token."""
NUM_PROBS = len(PROBS) + 1


def matched_class(length: int, share: int) -> int:
    """Class of a token that followed a match.

    Args:
        length: Which of :data:`LENGTHS`.
        share: Which of :data:`NUM_SHARES`.
    """
    return 1 + length * NUM_SHARES + share
