# SPDX-License-Identifier: Apache-2.0
"""What became of draft tokens beside what was expected of them, and by source if they have some.

By the strength of each source's evidence, too, if drafts say how strong it is.
"""

from collections.abc import Iterable, Sequence

from vllm_spec_ext.engine.watching.counts import WorkerCounts, add_to
from vllm_spec_ext.engine.watching.metric_names import MOST_STRENGTHS
from vllm_spec_ext.proposers.base import Draft, RequestStep, StepOutcome


class SourceCounter:
    """Counts by the names that drafts carry."""

    def __init__(self, counts: WorkerCounts) -> None:
        """Start without any source.

        Args:
            counts: Of the worker.
        """
        self._counts = counts
        self._waiting: dict[str, Draft] = {}
        self._strengths: set[tuple[str, str]] = set()  # that are told apart, with their sources

    def drafted(self, requests: Sequence[RequestStep], drafts: Sequence[Draft]) -> None:
        """Remember who named the nodes of these drafts, and what was expected of them."""
        for request, draft in zip(requests, drafts, strict=True):
            # In the place of one that was never verified.
            if draft.path_probs is not None or draft.sources is not None:
                self._waiting[request.request_id] = draft
            elif self._waiting:
                self._waiting.pop(request.request_id, None)

    def verified(self, outcomes: Sequence[StepOutcome]) -> None:
        """Count what became of them."""
        if not self._waiting:
            return
        together, sources = 0.0, dict[str, list[float]]()
        strengths = dict[tuple[str, str], list[float]]()
        for outcome in outcomes:
            draft = self._waiting.pop(outcome.request_id, None)
            if draft is None:
                continue
            size = min(outcome.num_drafted, len(draft))
            expected = [0.0] * size
            if draft.path_probs is not None:
                expected = draft.path_probs[:size].tolist()
            together += sum(expected)
            for node, names in enumerate((draft.sources or ())[:size]):
                counts = 1.0, float(node in outcome.accepted), expected[node]
                for name in names:
                    add_to(sources, name, counts)
                if draft.strengths is not None:
                    for pair in zip(names, draft.strengths[node], strict=True):
                        add_to(strengths, pair, counts)
        for name, sums in sources.items():
            self._counts.source(name, *sums)
        for pair, sums in strengths.items():
            if pair in self._strengths or len(self._strengths) < MOST_STRENGTHS:
                self._strengths.add(pair)
                self._counts.strength(*pair, *sums)
        self._counts.add(expected_nodes=together)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
