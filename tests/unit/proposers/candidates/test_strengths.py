# SPDX-License-Identifier: Apache-2.0
"""What classes of evidence are called."""

from vllm_spec_ext.proposers.candidates.evidence import (
    ANSWERS,
    COPY,
    CORPUS,
    DRAFTER,
    LENGTHS,
    NUM_PROBS,
    NUM_SHARES,
    NUM_SOURCES,
    OTHERS,
    OWN,
    RECYCLED,
    matched_class,
)
from vllm_spec_ext.proposers.candidates.strengths import (
    AGREEING,
    FOLLOWED,
    GIVEN,
    names_of_classes,
)


def test_every_class_that_speaks_for_a_token_has_a_name() -> None:
    assert (len(AGREEING), len(FOLLOWED), len(GIVEN)) == (len(LENGTHS) + 1, NUM_SHARES, NUM_PROBS)
    names = names_of_classes()
    assert len(names) == NUM_SOURCES
    for source, of_source in enumerate(names):
        assert len(of_source) == OTHERS
        last = 2 * NUM_PROBS
        if source in (OWN, ANSWERS):
            last = matched_class(len(LENGTHS) - (source == OWN), NUM_SHARES - 1)
        assert all(of_source[1 : last + 1])
        assert not of_source[0]
        assert not any(of_source[last + 1 :])
    assert names[OWN][matched_class(4, 0)] == "4 to 9 tokens agree, one continuation"
    assert names[ANSWERS][matched_class(7, 5)] == "same prompt, several continuations"
    for source in (RECYCLED, CORPUS, COPY, DRAFTER):
        assert names[source][1] == names[source][1 + NUM_PROBS] == "probability under 0.15"
        assert names[source][NUM_PROBS] == "probability 0.85 or more"


def test_labels_of_metrics_stay_few() -> None:
    kinds = [len(set(filter(None, of_source))) for of_source in names_of_classes()]
    assert kinds == [8, 10, 4, 4, 4, 4]
