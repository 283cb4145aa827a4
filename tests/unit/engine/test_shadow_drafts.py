# SPDX-License-Identifier: Apache-2.0
"""Drafts that are followed instead of verified."""

import numpy as np

from vllm_spec_ext.engine.drafting.shadow_drafts import ShadowDrafts, ShadowResult
from vllm_spec_ext.proposers.base import EMPTY_DRAFT, Draft, RequestStep, StepOutcome, chain


def at(request_id: str, *tokens: int) -> RequestStep:
    return RequestStep(request_id, np.array(tokens, np.int32), 1, tokens[-1:], room=8)


def test_a_chain_is_followed_to_its_first_wrong_token() -> None:
    shadows = ShadowDrafts()
    shadows.keep([at("a", 1, 2)], [chain([3, 4, 5])])
    assert shadows
    assert shadows.follow([at("a", 1, 2, 3)]) == ([], None)
    outcome = StepOutcome("a", 3, 1, (0,), is_shadow=True)
    assert outcome.num_verified == 0
    assert shadows.follow([at("a", 1, 2, 3, 9)]) == ([outcome], ShadowResult(1, 3, 1))
    assert not shadows
    assert shadows.follow([at("a", 1, 2, 3, 9, 9)]) == ([], None)


def test_a_chain_that_was_right_ends_with_its_last_token() -> None:
    shadows = ShadowDrafts()
    shadows.keep([at("a", 1)], [chain([3, 4])])
    shadows.follow([at("a", 1, 3)])
    outcomes, result = shadows.follow([at("a", 1, 3, 4)])
    assert outcomes[0].num_accepted == 2
    assert result == ShadowResult(1, 2, 2)


def test_a_tree_is_followed_along_the_branch_that_was_said() -> None:
    tree = Draft(np.array([3, 4, 5, 6], np.int32), np.array([-1, 0, -1, 2], np.int32))
    shadows = ShadowDrafts()
    shadows.keep([at("a", 1)], [tree])
    assert shadows.follow([at("a", 1, 5)]) == ([], None)
    outcomes, result = shadows.follow([at("a", 1, 5, 6)])
    assert outcomes == [StepOutcome("a", 4, 2, (2, 3), is_shadow=True)]
    assert result == ShadowResult(1, 4, 2)


def test_the_whole_is_told_when_the_last_request_is_known() -> None:
    shadows = ShadowDrafts()
    requests = [at("a", 1), at("b", 1), at("c", 1), at("d", 1)]
    shadows.keep(requests, [chain([2]), chain([2, 3]), EMPTY_DRAFT, chain([5, 6])])
    outcomes, result = shadows.follow([at("a", 1, 2), at("b", 1, 2), at("d", 1, 5)])
    assert [outcome.request_id for outcome in outcomes] == ["a"]
    assert result is None
    shadows.forget(["d"])  # what it had accepted counts
    outcomes, result = shadows.follow([at("a", 1, 2, 7), at("b", 1, 2, 7)])
    assert [outcome.request_id for outcome in outcomes] == ["b"]
    assert result == ShadowResult(4, 5, 3)


def test_what_a_newer_draft_took_the_place_of_counts_and_is_not_told() -> None:
    """The proposer would take it for the outcome of that one."""
    shadows = ShadowDrafts()
    shadows.keep([at("a", 1), at("b", 1)], [chain([2, 3, 4]), chain([2])])
    shadows.supersede(["a"])
    outcomes, result = shadows.follow([at("a", 1, 2, 3, 9), at("b", 1, 2, 9)])
    assert [outcome.request_id for outcome in outcomes] == ["b"]
    assert result == ShadowResult(2, 4, 3)
    shadows.keep([at("a", 1)], [chain([2])])
    assert [outcome.request_id for outcome in shadows.follow([at("a", 1, 2, 9)])[0]] == ["a"]


def test_requests_that_are_all_gone_end_it() -> None:
    shadows = ShadowDrafts()
    shadows.keep([at("a", 1)], [chain([2])])
    shadows.forget(["a", "never seen"])
    assert shadows.follow([]) == ([], ShadowResult(1, 1, 0))
    assert not shadows


def test_that_nothing_was_drafted_is_known_at_once() -> None:
    shadows = ShadowDrafts()
    shadows.keep([at("a", 1)], [EMPTY_DRAFT])
    assert shadows.follow([at("a", 1, 2)]) == ([], ShadowResult(1, 0, 0))
