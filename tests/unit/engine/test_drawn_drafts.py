# SPDX-License-Identifier: Apache-2.0
"""Distributions of drawn drafts: kept for their draft, used for the rows that are verified."""

import numpy as np
import torch

from vllm_spec_ext.engine.drafting.scheduled_draft import ScheduledDraft
from vllm_spec_ext.engine.requests.state import RequestState
from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.engine.verifying.drawn_drafts import (
    DraftDistributions,
    verified_rows,
    verify_drawn,
)
from vllm_spec_ext.options import RequestOptions
from vllm_spec_ext.scorers.walk.tree import Walk


def state(tokens: list[int], parents: list[int] | None = None, vocab: int = 5) -> RequestState:
    """A request whose draft was drawn."""
    found = RequestState(RequestOptions(), None, None, np.array([], np.int64))
    found.draft = ScheduledDraft("a", tokens, parents, "iid")
    found.probs = torch.full((len(tokens), vocab), 1 / vocab)
    return found


def test_distributions_belong_to_the_draft_that_is_verified() -> None:
    request = state([1, 2, 3])
    whole = request.distributions_of([1, 2, 3])
    assert whole is not None
    assert whole.probs.shape == (3, 5)
    cut = request.distributions_of([1, 2])  # by the scheduler
    assert cut is not None
    assert cut.probs.shape == (2, 5)
    assert request.distributions_of([-1, -1]) is None  # vLLM's placeholders
    assert request.distributions_of([]) is None
    request.draft, request.probs = ScheduledDraft("a", [1, 2, 3]), None  # chosen this time
    assert request.distributions_of([1, 2, 3]) is None


def test_parents_belong_to_the_draft_that_is_verified() -> None:
    request = state([1, 2, 3], [-1, 0, 0])
    assert request.parents_of([1, 2, 3]) == [-1, 0, 0]
    assert request.parents_of([1, 2]) is None  # what is left is a chain
    assert request.parents_of([-1, -1, -1]) is None
    assert request.parents_of([]) is None
    request.draft = None
    assert request.parents_of([1, 2, 3]) is None


def test_a_tree_that_was_cut_for_room_is_walked_as_far_as_it_was_verified() -> None:
    batch = DraftBatch.of([[3], [1, 2, -1], []], [None, [-1, -1, 0], None])
    assert verified_rows(batch, [1]).tolist() == [2, 3, 4]
    target = torch.zeros(3, 5)
    target[0, 2] = target[1, 4] = target[2, 4] = 1.0  # after the root comes 2, then 4
    probs = torch.full((3, 5), 0.2)
    before = Walk(
        np.full((3, 3), -1), np.array([[9, -1, -1, -1], [1, 4, -1, -1], [8, -1, -1, -1]]),
        np.array([0, 1, 0]),
    )  # fmt: skip
    drawn = {1: DraftDistributions(probs, "iid")}
    walk = verify_drawn(batch, drawn, target, np.zeros(6, np.int64), before)
    assert walk.emitted.tolist() == [[9, -1, -1, -1], [2, 4, -1, -1], [8, -1, -1, -1]]
    assert walk.accepted[1].tolist() == [1, -1, -1]
    assert walk.num_accepted.tolist() == [0, 1, 0]
    assert before.emitted[1].tolist() == [1, 4, -1, -1]


def test_in_a_row_in_which_nothing_may_be_said_vllms_sampler_is_believed() -> None:
    """As where all allowed tokens are stop tokens, and too few tokens are there to stop."""
    batch = DraftBatch.of([[3], [4], [1]], [None, None, None])
    target = torch.zeros(6, 5)
    nothing = torch.full((5,), float("-inf")).softmax(dim=-1)
    target[0] = target[1] = target[5] = nothing
    target[2, 4] = target[3, 1] = target[4, 1] = 1.0
    choices = np.array([2, 0, 0, 0, 0, 3])  # of the first root, and behind the last draft
    before = Walk(np.full((3, 1), -1), np.full((3, 2), -1), np.array([0, 0, 0]))
    probs = DraftDistributions(torch.full((1, 5), 0.2), "iid")
    walk = verify_drawn(batch, dict.fromkeys(range(3), probs), target, choices, before)
    assert walk.emitted.tolist() == [[2, -1], [4, 1], [1, 3]]
    assert walk.num_accepted.tolist() == [0, 1, 1]
