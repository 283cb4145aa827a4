# SPDX-License-Identifier: Apache-2.0
"""From trees of candidates to the drafts of a step, and back from outcomes to what sources deserve.

The methods `suffix_tree` and `recycling` are this with one source, `auto` with all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    Draft,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.candidates.calibration import Calibration
from vllm_spec_ext.proposers.candidates.evidence import OTHERS, TOGETHER
from vllm_spec_ext.proposers.candidates.given_drafts import NOTHING_GIVEN, Given
from vllm_spec_ext.proposers.candidates.lookup import Candidates, Lookup
from vllm_spec_ext.proposers.candidates.node_choice import choose
from vllm_spec_ext.proposers.candidates.strengths import names_of_classes
from vllm_spec_ext.proposers.draft_tree import is_branching
from vllm_spec_ext.proposers.payoff.forward_payoff import Retries

_DOUBTFUL = 0.7  # of the least probability: sources may promise too little
_TRIAL_NODES = 4  # of a step in which nothing pays by what is known, now and then


@dataclass(frozen=True)
class DraftCosts:
    """In tokens that the engine emits; 0 where all is drafted that there is room for."""

    node: float  # of verifying one node
    branch: float  # of each branch, beside its nodes
    any: float  # of any draft at all


class TreeDrafts:
    """Of one engine."""

    def __init__(self, names: Sequence[str], adaptive_length: bool) -> None:
        """Start with what is usual.

        Args:
            names: Of the sources, for pictures.
            adaptive_length: Draft what pays; otherwise all that there is room for.
        """
        from vllm_spec_ext.proposers.blockwise.tree import depth_first

        self._depth_first = depth_first
        depth_first(np.zeros((0, 3), np.int32))  # compile now
        self._credited = [
            tuple(name for place, name in enumerate(names) if together >> place & 1)
            for together in range(1 << len(names))
        ]
        self._strengths = names_of_classes()
        self._adaptive = adaptive_length
        self._retries = Retries()
        self.calibration = Calibration()

    def costs(self, step: StepContext) -> DraftCosts:
        """What the drafts of a step cost, as far as it is known."""
        if not self._adaptive:
            return DraftCosts(0.0, 0.0, 0.0)
        return DraftCosts(
            step.min_probability or 0.0, step.branch_cost or 0.0, step.fixed_cost or 0.0
        )

    def grow(
        self,
        lookup: Lookup,
        request: RequestStep,
        costs: DraftCosts,
        given: Given = NOTHING_GIVEN,
    ) -> Candidates:
        """The best tree for a request, with probabilities as far as they can be trusted.

        Args:
            lookup: That has just seen the request.
            request: Its room is the most nodes.
            costs: Paths that are less likely than a node costs are of no use, nor are branches that
                earn less than one costs.
            given: Drafts of other sources.
        """
        tree = lookup.grow(request, self.calibration.hopeful, _DOUBTFUL * costs.node, given)
        trust = self.calibration.trust
        return trust.best_part(request.request_id, tree, costs.node, costs.branch)

    def make(self, step: StepContext, trees: Sequence[Candidates | None]) -> list[Draft]:
        """One draft for each request.

        Args:
            step: The requests.
            trees: Of each; None where it has no room.
        """
        drafts = [EMPTY_DRAFT] * len(trees)
        rows = [row for row, tree in enumerate(trees) if tree is not None and len(tree)]
        grown = [tree for tree in trees if tree is not None and len(tree)]
        if not rows:
            return drafts
        costs = self.costs(step)
        paths = [tree.paths for tree in grown]
        counts = choose(paths, costs.node, costs.any, step.max_nodes)
        if any(counts):
            self._retries.pays()
        elif self._retries.due():
            counts = choose([one[:_TRIAL_NODES] for one in paths], 0.0, most=step.max_nodes)
        for row, tree, count in zip(rows, grown, counts, strict=True):
            if count:
                drafts[row] = self._draft(step.requests[row].request_id, tree, count)
        return drafts

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how much the sources are worth."""
        for outcome in outcomes:
            self.calibration.verified(outcome.request_id, outcome.num_drafted, outcome.accepted)

    def _draft(self, name: str, tree: Candidates, count: int) -> Draft:
        """The first nodes of a tree, the likeliest path first."""
        parents, order = tree.parents[:count], np.arange(count)
        if is_branching(parents.tolist()):
            nodes = np.stack([parents, order, order], axis=1).astype(np.int32)
            order, _, parents = self._depth_first(nodes)
        evidence = tree.evidence[order]
        self.calibration.drafted(name, parents, evidence, tree.said[order])
        return Draft(
            tree.tokens[order],
            parents if is_branching(parents.tolist()) else None,
            path_probs=tree.paths[order],
            sources=tuple(map(self._credited.__getitem__, (evidence[:, TOGETHER] - 1).tolist())),
            strengths=tuple(map(self._strengths_of, evidence[:, :TOGETHER].tolist())),
        )

    def _strengths_of(self, classes: Sequence[int]) -> tuple[str, ...]:
        """Of the sources that name a node, in the order of their names."""
        return tuple(
            names[found]
            for names, found in zip(self._strengths, classes, strict=True)
            if 0 < found < OTHERS
        )
