# SPDX-License-Identifier: Apache-2.0
"""A method that drafts from looked-up sources alone."""

from abc import abstractmethod
from collections.abc import Sequence

from vllm_spec_ext.proposers.base import (
    BaseProposer,
    Draft,
    EngineHandle,
    Needs,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.candidates.evidence import NAMES
from vllm_spec_ext.proposers.candidates.lookup import Candidates, Lookup
from vllm_spec_ext.proposers.candidates.tree_drafts import DraftCosts, TreeDrafts


class LookupMethod(BaseProposer):
    """See :mod:`.lookup`; a method says which sources it has."""

    needs = Needs(shares_nodes=True)

    @abstractmethod
    def lookup(self, engine: EngineHandle) -> Lookup:
        """The sources, for :meth:`start`."""

    def start(self, engine: EngineHandle) -> None:
        """Compile the search."""
        self._lookup = self.lookup(engine)
        self._drafts = TreeDrafts((*NAMES, ""), self.options.adaptive_length)

    def propose(self, step: StepContext) -> list[Draft]:
        """A tree of candidates for each request, as far as they pay."""
        costs = self._drafts.costs(step)
        return self._drafts.make(step, [self._grow(request, costs) for request in step.requests])

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how much the sources are worth."""
        self._drafts.observe(outcomes)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the requests, and keep their answers for later ones."""
        for request_id in request_ids:
            self._lookup.finish(request_id)
            self._drafts.calibration.forget(request_id)

    def _grow(self, request: RequestStep, costs: DraftCosts) -> Candidates | None:
        if not request.options.enabled:
            return None
        self._lookup.follow(request)
        if request.room <= 0:
            return None
        return self._drafts.grow(self._lookup, request, costs)
