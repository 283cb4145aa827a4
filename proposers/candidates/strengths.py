# SPDX-License-Identifier: Apache-2.0
"""How strong evidence is, in plain words: a few kinds for each source.

The log-odds of :mod:`.calibration` tell dozens of classes of a source apart, more than tables and
the labels of metrics should have. So neighbours share a name here: what is promised of them is held
against what is found together.
"""

from vllm_spec_ext.proposers.candidates.evidence import ANSWERS, NUM_SOURCES, OTHERS, OWN

# By length of the match, as of evidence.LENGTHS, and behind it an answer to the same prompt.
AGREEING = (
    "1 token agrees",
    *["2 or 3 tokens agree"] * 2,
    *["4 to 9 tokens agree"] * 3,
    "10 or more tokens agree",
    "same prompt",
)
# By how often the token followed, as of evidence.NUM_SHARES: nearly always, or not.
FOLLOWED = (*["one continuation"] * 3, *["several continuations"] * 4)
# By what the source gives the token, as of evidence.PROBS.
GIVEN = (
    *["probability under 0.15"] * 4,
    *["probability 0.15 to 0.5"] * 2,
    *["probability 0.5 to 0.85"] * 2,
    *["probability 0.85 or more"] * 2,
)


def names_of_classes() -> tuple[tuple[str, ...], ...]:
    """[sources][classes] what the classes in which a source names a token are called.

    Class 0, in which it has nothing to say, and numbers that are no class have no name.
    """
    matched = [f"{length}, {share}" for length in AGREEING for share in FOLLOWED]
    given = [*GIVEN, *GIVEN]  # what is deep in its draft, or behind one token only, has no others
    named = {OWN: matched[: -len(FOLLOWED)], ANSWERS: matched}  # no own text is of the same prompt
    found = (named.get(source, given) for source in range(NUM_SOURCES))
    return tuple(("", *names, *[""] * (OTHERS - 1 - len(names))) for names in found)
