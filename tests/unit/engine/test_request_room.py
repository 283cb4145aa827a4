# SPDX-License-Identifier: Apache-2.0
"""How many tokens may be drafted for a request, by its own options; the same for every method."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.engine.drafting.step_drafts import StepDrafts
from vllm_spec_ext.engine.requests.state import KnownRequest, RequestState
from vllm_spec_ext.options import RequestOptions


def state_of(**more: Any) -> RequestState:
    given: Any = {"options": RequestOptions(), "rule": None, "eta": None, "exact_ids": np.empty(0)}
    return RequestState(**{**given, **more})


def test_nobody_learns_what_was_accepted_behind_the_end_of_an_answer() -> None:
    """Earlier answers would grow by it, each time that the same is asked."""
    params: Any = SimpleNamespace(max_tokens=50, temperature=0.0, top_k=0, top_p=1.0, seed=None)
    state: Any = state_of(ends=frozenset({7}))
    drafts: Any = SimpleNamespace(_unread=SimpleNamespace(pop=lambda name: []))

    def seen(size: int, new: list[int]) -> tuple[list[int], list[int], int]:
        known = KnownRequest(np.arange(size, dtype=np.int32), 5, params)
        drafts._runner = SimpleNamespace(known=lambda name: known, max_model_len=100)
        found = StepDrafts.request_step(drafts, "a", state, new, 4)
        return found.token_ids.tolist(), list(found.new_tokens), found.room

    assert seen(7, [6]) == ([*range(7)], [6], 4)
    assert seen(10, [7, 8, 9]) == ([*range(8)], [7], 0)
    # An asynchronous scheduler has one more step on its way by then.
    assert seen(11, [10]) == ([*range(8)], [], 0)
    assert seen(11, []) == ([*range(8)], [], 0)


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({}, 4),
        ({"max_draft_tokens": 2}, 2),
        ({"max_draft_tokens": 9}, 4),
        ({"enabled": False}, 0),
        ({"enabled": False, "max_draft_tokens": 9}, 0),
    ],
)
def test_what_a_request_says_holds_whatever_the_method_reads(
    options: dict[str, Any], room: int
) -> None:
    params: Any = SimpleNamespace(max_tokens=50, temperature=0.0, top_k=0, top_p=1.0, seed=None)
    known = KnownRequest(np.arange(9, dtype=np.int32), 5, params)
    state: Any = state_of(options=RequestOptions(**options))
    runner = SimpleNamespace(known=lambda name: known, max_model_len=100)
    drafts: Any = SimpleNamespace(_runner=runner, _unread=SimpleNamespace(pop=lambda name: []))
    assert StepDrafts.request_step(drafts, "a", state, [8], 4).room == room
