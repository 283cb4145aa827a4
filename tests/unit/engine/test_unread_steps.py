# SPDX-License-Identifier: Apache-2.0
"""What is unread of steps that went by: tokens, and the rows of hidden states."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from vllm_spec_ext.engine.drafting.step_drafts import StepDrafts
from vllm_spec_ext.engine.drafting.unread_tokens import UnreadSteps, UnreadTokens
from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.engine.models.unread_states import UnreadStates, with_unread

NAMES = ("a", "b", "c")


def row(name: str, computed: int, states: list[int]) -> BatchRow:
    tokens = np.arange(computed + len(states) + 1, dtype=np.int32)
    blocks = np.arange(4, dtype=np.int32)
    return BatchRow(
        name, blocks, tokens, False, computed=computed, state_rows=np.array(states, np.int64)
    )


def test_requests_that_stayed_are_known_by_their_row() -> None:
    unread = UnreadTokens()
    assert unread.begin_reading(NAMES).num_steps == 0
    for step in range(2):
        new = [[step], [10 + step], [20 + step]]
        assert unread.can_take(NAMES, new)
        unread.take(new)
    # It is gone, or was preempted and comes back with its name.
    assert unread.forget(["b", "never seen"]) == 2
    found = unread.begin_reading(("c", "b", "a", "d"))
    assert (found.num_steps, found.num_requests) == (2, 3)
    assert found.places == {"a": 0, "c": 2}
    assert [unread.pop(name) for name in ("c", "b", "a")] == [[20, 21], [], [0, 1]]
    after = unread.begin_reading(("c",))
    assert (after.num_steps, after.places) == (0, {})


def test_what_is_unread_of_a_request_that_sits_a_step_out_is_read_before() -> None:
    """A session between two turns stays; when it goes on its states are gone."""
    begun: list[list[str]] = []

    def begin_step(rows: list[BatchRow], unread: UnreadSteps) -> None:
        begun.append([one.request_id for one in rows])
        assert unread.num_steps == 1

    drafter = SimpleNamespace(
        models=True, begin_models=begin_step, end_models=lambda could_draft: None
    )
    runner = SimpleNamespace(
        drafter=drafter,
        spec_step=SimpleNamespace(request_ids=NAMES),
        rows_of=lambda step, new: [row(name, 3, [0]) for name in step.request_ids],
    )
    drafts = StepDrafts.__new__(StepDrafts)
    drafts._runner, drafts._unread = cast(Any, runner), UnreadTokens()
    drafts._unread.begin_reading(NAMES)
    drafts._unread.take([[1], [2], [3]])
    drafts.settle_all_but({"a": 1, "b": 1, "c": 1})
    assert not begun
    drafts.settle_all_but({"a": 1, "c": 1})
    drafts.settle_all_but({"a": 1})
    assert begun == [["a", "b", "c"]]


def test_states_of_all_steps_stand_in_order() -> None:
    """Row 10 * step + request; the target's rows are more than there are requests."""
    kept = UnreadStates()
    for step in range(2):
        states = torch.tensor([[10.0 * step + place] for place in range(5)])
        kept.keep([states, -states], len(NAMES))
        states.fill_(99.0)  # vLLM may use it again
    now = torch.tensor([[20.0], [21.0], [22.0], [23.0]])
    first, second = kept.join([now, -now])
    assert torch.equal(second, -first)
    rows = with_unread(
        [row("c", 7, [0, 1]), row("new", 0, [2]), row("a", 5, [3])], {"a": 0, "c": 2}, 3, 2
    )
    assert [one.computed for one in rows] == [5, 0, 3]
    values = [first[one.state_rows].flatten().tolist() for one in rows]
    assert values == [[2.0, 12.0, 20.0, 21.0], [22.0], [0.0, 10.0, 23.0]]
    assert torch.equal(kept.join([now])[0], now)  # nothing is left
