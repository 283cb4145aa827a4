# SPDX-License-Identifier: Apache-2.0
"""Drafts of whole methods as candidates, beside what is looked up node by node."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import EMPTY_DRAFT, Draft, IntArray


@dataclass(frozen=True)
class Given:
    """The drafts that two sources bring; either may be empty."""

    tokens: IntArray  # [n]
    parents: IntArray  # [n] within the same draft, -1 = the root
    paths: NDArray[np.float32]  # [n] path probabilities
    second: int  # where the second draft begins


NOTHING_GIVEN = Given(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), 0)


def given_by(copy: Draft | None, draft: Draft | None) -> Given:
    """Two drafts as candidates; a draft that says nothing of its nodes counts as sure of them.

    Args:
        copy: Of the input.
        draft: Of a drafter.
    """
    first, second = copy or EMPTY_DRAFT, draft or EMPTY_DRAFT
    if not len(first) and not len(second):
        return NOTHING_GIVEN
    parts = [_arrays(one) for one in (first, second) if len(one)]
    if len(parts) == 1:
        return Given(*parts[0], second=len(first))
    tokens, parents, paths = (np.concatenate(both) for both in zip(*parts, strict=True))
    return Given(tokens, parents, paths, len(first))


def _arrays(draft: Draft) -> tuple[IntArray, IntArray, NDArray[np.float32]]:
    size, parents, paths = len(draft), draft.parents, draft.path_probs
    return (
        np.asarray(draft.tokens, np.int32),
        np.arange(-1, size - 1, dtype=np.int32) if parents is None else parents.astype(np.int32),
        np.ones(size, np.float32) if paths is None else np.asarray(paths, np.float32),
    )
