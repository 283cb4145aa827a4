# SPDX-License-Identifier: Apache-2.0
"""Drafts of whole methods as candidates, beside what is looked up node by node."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import Draft, IntArray
from vllm_spec_ext.proposers.candidates.evidence import given_classes
from vllm_spec_ext.proposers.draft_tree import parents_of


@dataclass(frozen=True)
class Given:
    """The drafts that two sources bring; either may be empty."""

    tokens: IntArray  # [n]
    parents: IntArray  # [n] within the same draft, -1 = the root
    classes: NDArray[np.int16]  # [n] of evidence
    second: int  # where the second draft begins


NOTHING_GIVEN = Given(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int16), 0)


def given_by(copy: Draft | None, draft: Draft | None) -> Given:
    """Two drafts as candidates; a draft that says nothing of its nodes counts as sure of them.

    Args:
        copy: Of the input.
        draft: Of a drafter.
    """
    tokens, parents, classes = [], [], []
    for one in (copy, draft):
        if one is None or not len(one):
            continue
        up = parents_of(one)
        probs = one.path_probs
        tokens.append(one.tokens)
        parents.append(np.array(up, np.int32))
        classes.append(given_classes(up, np.ones(len(one), np.float32) if probs is None else probs))
    second = 0 if copy is None else len(copy)
    if not tokens:
        return NOTHING_GIVEN
    return Given(
        np.concatenate(tokens).astype(np.int32),
        np.concatenate(parents),
        np.concatenate(classes),
        second,
    )
