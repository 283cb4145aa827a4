# SPDX-License-Identifier: Apache-2.0
"""What a step verifies, read from the step and the states of its requests."""

from collections.abc import Sequence

from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.engine.verifying.drawn_drafts import DraftDistributions


def step_batch(step: Step) -> DraftBatch:
    """The drafts of the step, without what the tree plan had to drop."""
    parents: list[Sequence[int] | None] = [None] * len(step.drafts)
    for row, kept in enumerate(step.kept):
        if kept >= 0:
            known = step.parents[row] or []
            parents[row] = [*known, *[-1] * (len(step.drafts[row]) - len(known))]
    return DraftBatch.of(step.verified, parents)


def drawn_of(step: Step, greedy: Sequence[bool]) -> dict[int, DraftDistributions]:
    """Batch index -> distributions of the sampled requests whose drafts were drawn."""
    found = {
        row: state.distributions_of(step.drafts[row])
        for row, state in enumerate(step.states)
        if state.probs is not None and not greedy[row]
    }
    return {row: each for row, each in found.items() if each is not None}
