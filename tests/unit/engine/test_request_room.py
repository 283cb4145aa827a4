# SPDX-License-Identifier: Apache-2.0
"""How many tokens may be drafted for a request, by its own options; the same for every method."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.engine.drafting.shadow_drafts import ShadowDrafts
from vllm_spec_ext.engine.drafting.step_drafts import StepDrafts
from vllm_spec_ext.engine.requests.state import KnownRequest, RequestState
from vllm_spec_ext.options import RequestOptions
from vllm_spec_ext.proposers.base import Draft, RequestStep


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


def test_no_step_is_saved_by_what_was_accepted_behind_the_end_of_an_answer() -> None:
    counted: list[tuple[int, ...]] = []
    budget = SimpleNamespace(verified=lambda *given: counted.append(given[:3]))
    drafts: Any = SimpleNamespace(budget=budget, _num_branches=lambda step: 0)
    step: Any = SimpleNamespace(
        states=[state_of(ends=frozenset({7})), state_of()],
        drafts=[[6, 7, 8, 9], [7]],
        started=None,
    )
    StepDrafts._observe_step(drafts, step, [[6, 7, 8, 9, 1], [7, 2]])
    assert counted == [(2, 5, 2 + 2)]


def test_a_session_that_waits_for_its_next_turn_ends_the_drafts_that_were_followed() -> None:
    def seen(name: str, *tokens: int) -> Any:
        return RequestStep(name, np.array(tokens, np.int32), 1, tokens[-1:], 4)

    told: list[tuple[int, ...]] = []
    budget = SimpleNamespace(shadowed=lambda *given: told.append(given))
    drafts: Any = SimpleNamespace(budget=budget, _shadows=ShadowDrafts())
    begun = [seen("session", 1, 5), seen("other", 1, 5)]
    drafts._shadows.keep(begun, [Draft(np.array([6, 7, 8, 9], np.int32))] * 2)
    ended, goes_on = state_of(over_at=4), state_of()
    step: Any = SimpleNamespace(request_ids=["session", "other"], states=[ended, goes_on])
    StepDrafts._follow_shadows(drafts, step, [seen("session", 1, 5, 6, 7), seen("other", 1, 5, 2)])
    step = SimpleNamespace(request_ids=["other"], states=[goes_on])
    StepDrafts._follow_shadows(drafts, step, [seen("other", 1, 5, 2, 3)])
    assert not drafts._shadows
    assert told == [(2, 8, 2)]


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
