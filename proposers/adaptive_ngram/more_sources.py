# SPDX-License-Identifier: Apache-2.0
"""N-gram drafts in one tree with what is looked up elsewhere: suffix frequency, recycled rows.

What each is worth is learned (:mod:`..candidates.calibration`), the n-gram tree's estimates too.
"""

from collections.abc import Sequence

from vllm_spec_ext.proposers.adaptive_ngram.options import AdaptiveNgramOptions
from vllm_spec_ext.proposers.base import Draft, EngineHandle, StepContext, StepOutcome
from vllm_spec_ext.proposers.candidates.evidence import NAMES
from vllm_spec_ext.proposers.candidates.given_drafts import given_by
from vllm_spec_ext.proposers.candidates.lookup import Lookup
from vllm_spec_ext.proposers.candidates.tree_drafts import TreeDrafts

_LONGEST_MATCH = 24  # tokens


class MoreSources:
    """Of one engine."""

    def __init__(self, options: AdaptiveNgramOptions, engine: EngineHandle) -> None:
        """Start empty, and compile the search."""
        self._lookup = Lookup(
            engine.vocab_size,
            own_text=options.own_text,
            earlier_answers=options.earlier_answers,
            recycled_contexts=options.recycled_contexts,
            max_cache_salts=options.max_cache_salts,
            max_ngram=_LONGEST_MATCH,
        )
        self._drafts = TreeDrafts((*NAMES, "n-grams"), options.adaptive_length)

    def merge(self, step: StepContext, drafts: Sequence[Draft]) -> list[Draft]:
        """One tree for each request, as far as its nodes pay.

        Args:
            step: The requests.
            drafts: Of the n-grams.
        """
        costs = self._drafts.costs(step)
        trees = []
        for request, draft in zip(step.requests, drafts, strict=True):
            if request.options.enabled:
                self._lookup.follow(request)
            trees.append(
                self._drafts.grow(self._lookup, request, costs, given_by(None, draft))
                if request.room > 0 and request.options.enabled
                else None
            )
        return self._drafts.make(step, trees)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how much the sources are worth."""
        self._drafts.observe(outcomes)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the requests, and keep their answers for later ones."""
        for request_id in request_ids:
            self._lookup.finish(request_id)
            self._drafts.calibration.forget(request_id)
