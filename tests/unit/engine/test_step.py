# SPDX-License-Identifier: Apache-2.0
"""What is told of a step's drafts where there was no room to verify all of them."""

import numpy as np
import torch

from vllm_spec_ext.engine.drafting.scheduled_draft import ScheduledDraft
from vllm_spec_ext.engine.drafting.step_tap import failed_at
from vllm_spec_ext.engine.requests.state import RequestState
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.trees.plan import build_plan
from vllm_spec_ext.engine.verifying.likeliest_tokens import LikeliestTokens
from vllm_spec_ext.engine.verifying.step_batch import step_batch
from vllm_spec_ext.options import RequestOptions
from vllm_spec_ext.scorers.walk.tree import walk_samples

TOKENS = [10, 11, 12, 13, 14]
PARENTS = [-1, 0, -1, 2, -1]


def planned(num_free: int) -> Step:
    """The root's children are 10, 12 and 14; the last has a branch of its own."""
    state = RequestState(RequestOptions(), None, None, np.zeros(0, np.int64))
    state.draft = ScheduledDraft("a", TOKENS, PARENTS, None)
    step = Step(("a",), [TOKENS], [6], None, states=[state])
    plan = build_plan(step.tree_rows([0], [1]), [[0]], 16, list(range(1, 1 + num_free)))
    step.kept = plan.kept.tolist()
    batch = step_batch(step)
    samples = np.array([14] + [99] * 5)
    step.walk = walk_samples(batch.parents, batch.tokens, batch.node_starts, samples)
    return step


def test_nodes_that_were_left_out_are_neither_drafts_nor_foresight() -> None:
    step = planned(num_free=1)
    assert step.verified == [[10, 11, 12, 13, -1]]
    (outcome,) = step.outcomes([[14]])
    assert (outcome.num_drafted, outcome.num_accepted) == (4, 0)
    rows = LikeliestTokens.of(torch.randn(6, 64), 2)
    (foreseen,) = rows.of_requests([(1, 2)], step.verified, step.parents)
    assert foreseen is not None
    assert foreseen.contexts.tolist() == [[1, 2], [2, 10], [10, 11], [2, 12], [12, 13]]
    assert failed_at(step.verified[0], step.parents[0], ()) == 1


def test_with_room_for_all_of_them_they_are_both() -> None:
    step = planned(num_free=2)
    assert step.verified == [TOKENS]
    (outcome,) = step.outcomes([[14, 99]])
    assert (outcome.num_drafted, outcome.nodes) == (5, (4,))
