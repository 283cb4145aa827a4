# SPDX-License-Identifier: Apache-2.0
"""Views of the target's cache on the V2 runner: all of a full view is accepted, no mean is stale.

The tests of V1, one of each kind.
"""

from typing import Any

import pytest
import test_cache_view_engine as views
from shared_engines import expected_long
from test_cache_view_engine import Means, engines, means, outcomes

__all__ = ["engines", "expected_long", "means", "outcomes"]

FREE = ("mixed_lengths", "several_samples")


def test_the_target_accepts_all_that_a_full_view_drafts(
    engines: Any,
    expected: Any,
    expected_long: Any,
    outcomes: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(views, "FREE", FREE)
    views.test_the_target_accepts_all_that_a_full_view_drafts(
        engines, expected, expected_long, outcomes
    )


def test_same_tokens_of_long_prompts(
    engines: Any, expected_long: Any, means: Means, outcomes: Any
) -> None:
    views.test_same_tokens_of_long_prompts("dense", engines, expected_long, means, outcomes)


def test_preemption(
    engines: Any, plain: Any, means: Means, outcomes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    views.test_preemption("retrieval", engines, plain, means, outcomes, monkeypatch)


def test_reviews_and_trees_over_two_views(
    make_engine: Any, expected_long: Any, means: Means
) -> None:
    views.test_reviews_and_trees_over_two_views(make_engine, expected_long, means)
