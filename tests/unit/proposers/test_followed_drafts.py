# SPDX-License-Identifier: Apache-2.0
"""A drafter learns from the target's tokens, also of what was not verified."""

from collections.abc import Sequence

import numpy as np
import pytest

from vllm_spec_ext.proposers.base import EMPTY_DRAFT, Draft, RequestStep, StepOutcome, chain
from vllm_spec_ext.proposers.followed_drafts import FollowedDrafts


def request(tokens: Sequence[int], name: str = "r") -> RequestStep:
    return RequestStep(name, np.array(tokens, np.int32), 1, list(tokens[-1:]), room=8)


def tree() -> Draft:
    #   1 - 2 - 3
    #   |    \
    #   |      4
    #   5 - 6
    parents = np.array([-1, 0, 1, 1, -1, 4], np.int32)
    return Draft(np.array([1, 2, 3, 4, 5, 6], np.int32), parents)


@pytest.mark.parametrize(
    ("said", "num_drafted", "accepted"),
    [
        ([9], 6, ()),
        ([1, 2, 4], 6, (0, 1, 3)),
        ([1, 2, 3, 7], 6, (0, 1, 2)),
        ([5, 6, 8], 6, (4, 5)),
        ([5, 9], 6, (4,)),
    ],
)
def test_a_tree_is_judged_as_far_as_is_known(
    said: list[int], num_drafted: int, accepted: tuple[int, ...]
) -> None:
    outcomes = FollowedDrafts()
    outcomes.keep([request([7, 8])], [tree()])
    told = outcomes.follow([request([7, 8, *said])])
    assert told == [StepOutcome("r", num_drafted, len(accepted), accepted)]
    assert outcomes.follow([request([7, 8, *said])]) == []  # once


def test_nothing_is_told_while_the_end_is_not_known() -> None:
    outcomes = FollowedDrafts()
    outcomes.keep([request([7, 8])], [tree()])
    assert outcomes.follow([request([7, 8, 1])]) == []
    assert outcomes.follow([request([7, 8, 1, 2])]) == []
    assert outcomes.follow([request([7, 8, 1, 2, 9])]) == [StepOutcome("r", 6, 2, (0, 1))]


def test_each_request_has_its_own() -> None:
    outcomes = FollowedDrafts()
    requests = [request([7], name) for name in "abc"]
    outcomes.keep(requests, [chain([1, 2]), EMPTY_DRAFT, chain([3])])
    outcomes.forget(["a"])
    told = outcomes.follow([request([7, 3, 4], name) for name in "abc"])
    assert told == [StepOutcome("c", 1, 1, (0,))]
