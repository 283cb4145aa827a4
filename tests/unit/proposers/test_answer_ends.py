# SPDX-License-Identifier: Apache-2.0
"""Drafts end with stop tokens, and proposers hear of what they drafted."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from vllm_spec_ext.engine.trees.plan import fitting_prefix
from vllm_spec_ext.proposers.answer_ends import AnswerEnds
from vllm_spec_ext.proposers.draft_tree import parents_of
from vllm_spec_ext.proposers.records import EMPTY_DRAFT, Draft, RequestStep, StepOutcome, chain
from vllm_spec_ext.scorers.walk.multi_step import draw_uniforms, multi_step

STOP = 2
TOKENS = [5, STOP, 6, 7, STOP, 8, 9]
PARENTS = [-1, 0, 1, 2, 0, 4, 0]
"""5 and below it a stop token with two tokens behind it, another one with one, and 9."""


def request(name: str = "a", ends: Sequence[int] = (STOP, 3)) -> RequestStep:
    text = np.array([1, 4], np.int32)
    return RequestStep(name, text, 1, [4], room=8, ends=frozenset(ends))


def tree(**more: object) -> Draft:
    return Draft(np.array(TOKENS, np.int32), np.array(PARENTS, np.int32), **more)  # type: ignore[arg-type]


def test_a_chain_ends_with_the_first_stop_token() -> None:
    ends = AnswerEnds()
    told = chain([5, 3, STOP, 6])
    (cut,) = ends.cut([request()], [told])
    assert cut.tokens.tolist() == [5, 3]
    assert cut.parents is None
    outcome = StepOutcome("a", 2, 1)
    assert ends.restored([outcome]) == [outcome]  # its first tokens are those of the proposer's
    drawn = Draft(told.tokens, probs=torch.eye(4))
    assert torch.equal(ends.cut([request()], [drawn])[0].probs, torch.eye(4)[:2])


def test_drafts_without_stop_tokens_are_left_as_they_are() -> None:
    ends = AnswerEnds()
    drafts = [chain([5, 6]), EMPTY_DRAFT, tree(), chain([5, STOP])]
    requests = [request("a"), request("b"), request("c", ends=()), request("d")]
    found = ends.cut(requests, drafts)
    assert all(one is other for one, other in zip(found, drafts, strict=True))


def test_a_tree_loses_what_stands_behind_them_and_its_proposer_hears_of_its_own_nodes() -> None:
    ends = AnswerEnds()
    path_probs = np.linspace(0.9, 0.3, 7, dtype=np.float32)
    sources = tuple((str(node),) for node in range(7))
    named = {"sources": sources, "strengths": sources[::-1]}
    (cut,) = ends.cut([request()], [tree(path_probs=path_probs, **named)])
    kept = [0, 1, 4, 6]
    assert cut.tokens.tolist() == [5, STOP, STOP, 9]
    assert cut.parents is not None
    assert cut.parents.tolist() == [-1, 0, 0, 0]
    assert cut.path_probs is not None
    assert cut.path_probs.tolist() == path_probs[kept].tolist()
    assert cut.sources == tuple(sources[node] for node in kept)
    assert cut.strengths == tuple(sources[6 - node] for node in kept)
    outcomes = [StepOutcome("a", 4, 2, (0, 3)), StepOutcome("b", 1, 1)]
    assert ends.restored(outcomes) == [StepOutcome("a", 7, 2, (0, 6)), StepOutcome("b", 1, 1)]
    # The engine had room for three nodes.
    assert ends.restored([StepOutcome("a", 3, 1, (0,))]) == [StepOutcome("a", 5, 1, (0,))]


def test_what_was_left_out_of_a_draft_says_nothing_of_the_next_one() -> None:
    ends = AnswerEnds()
    outcome = StepOutcome("a", 2, 2, (0, 1))
    for forget in (
        lambda: ends.cut([request()], [chain([5, 6])]),
        lambda: ends.cut([request()], [EMPTY_DRAFT]),
        lambda: ends.forget(["a"]),
    ):
        ends.cut([request()], [tree()])
        assert ends.restored([StepOutcome("a", 3, 1, (0,))])[0].num_drafted == 5
        forget()
        assert ends.restored([outcome]) == [outcome]


@pytest.mark.parametrize("num_free", [0, 1, 2])
@pytest.mark.parametrize(
    ("target", "drafter"),
    [([0.3, 0.4, 0.3], [0.5, 0.3, 0.2]), ([0.2, 0.35, 0.45], [0.6, 0.2, 0.2])],
)
def test_drawn_trees_follow_the_target_where_scratch_blocks_are_short(
    target: list[float], drafter: list[float], num_free: int
) -> None:
    """A branch is verified if all of it fits, so how long it is must not follow from its draws."""
    num_runs, parents = 20_000, np.array([-1, -1, 1], np.int32)
    rng = np.random.default_rng(4)
    drawn = rng.choice(3, (num_runs, 3), p=drafter).astype(np.int32)
    rows = torch.tensor([drafter] * 3)
    ends = AnswerEnds()
    asked = request(ends=(1,))
    tokens, above, starts = [], [], [0]
    for run in drawn:
        (draft,) = ends.cut([asked], [Draft(run, parents, probs=rows)])
        kept = parents_of(draft)
        size, _ = fitting_prefix(kept, 6, 4, num_free)
        tokens += draft.tokens[:size].tolist()
        above += kept[:size]
        starts.append(len(tokens))
    found = multi_step(
        np.tile(target, (len(tokens) + num_runs, 1)),
        np.array(above, np.int64),
        np.array(tokens, np.int64),
        np.array(starts),
        np.tile(drafter, (len(tokens), 1)),
        uniforms=draw_uniforms(np.array(starts), torch.Generator().manual_seed(5)),
        drawn="iid",
    )
    shares = np.bincount(found.emitted[:, 0], minlength=3) / num_runs
    # Five standard errors.
    assert np.all(np.abs(shares - target) < 5 * np.sqrt(np.array(target) / num_runs))
