# SPDX-License-Identifier: Apache-2.0
"""Nothing is verified behind a stop token in a draft: an answer that says it is over.

Copies run into the end of a turn and on into the next one, and short answers end often: by 135
recorded answers of up to 48 tokens, a twentieth of the time went there when sentences were to be
copy-edited. Proposers need not look: what they draft behind a stop token is left out, and they hear
of it like of other nodes whose parent was not accepted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from vllm_spec_ext.proposers.draft_tree import parents_of
from vllm_spec_ext.proposers.records import Draft, RequestStep, StepOutcome


class AnswerEnds:
    """What was left out of the drafts that wait for their outcome."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._places: dict[str, list[int]] = {}  # in the proposer's draft, of each node that stayed

    def cut(self, requests: Sequence[RequestStep], drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts without what stands behind a stop token of their requests."""
        if self._places:
            self.forget(request.request_id for request in requests)
        return [
            self._without_ends(request, draft)
            if not request.ends.isdisjoint(draft.tokens.tolist()) and _may_be_cut(draft)
            else draft
            for request, draft in zip(requests, drafts, strict=True)
        ]

    def restored(self, outcomes: Sequence[StepOutcome]) -> Sequence[StepOutcome]:
        """The outcomes in the numbers of the proposer's own drafts."""
        if not self._places:
            return outcomes
        return [self._restored(outcome) for outcome in outcomes]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone, or have other drafts."""
        for request_id in request_ids:
            self._places.pop(request_id, None)

    def _without_ends(self, request: RequestStep, draft: Draft) -> Draft:
        parents = parents_of(draft)
        new_places = [-1] * len(draft)  # -1 = it is left out
        kept: list[int] = []
        for node, parent in enumerate(parents):
            if parent < 0 or (new_places[parent] >= 0 and draft.tokens[parent] not in request.ends):
                new_places[node] = len(kept)
                kept.append(node)
        if len(kept) == len(draft):
            return draft
        if kept[-1] != len(kept) - 1:  # the first ones keep their numbers
            self._places[request.request_id] = kept
        above = [-1 if parents[node] < 0 else new_places[parents[node]] for node in kept]
        nodes = np.array(kept)
        return replace(
            draft,
            tokens=draft.tokens[nodes],
            parents=None if draft.parents is None else np.array(above, np.int32),
            probs=None if draft.probs is None else draft.probs[kept],
            path_probs=None if draft.path_probs is None else draft.path_probs[nodes],
            sources=None if draft.sources is None else tuple(draft.sources[i] for i in kept),
            strengths=None if draft.strengths is None else tuple(draft.strengths[i] for i in kept),
        )

    def _restored(self, outcome: StepOutcome) -> StepOutcome:
        kept = self._places.get(outcome.request_id)
        if kept is None or not outcome.num_drafted:
            return outcome
        return replace(
            outcome,
            num_drafted=kept[outcome.num_drafted - 1] + 1,
            nodes=tuple(kept[node] for node in outcome.accepted),
        )


def _may_be_cut(draft: Draft) -> bool:
    """Not a drawn tree: where scratch blocks are short, a branch is verified if all of it fits.

    So by how long one is it would depend on what was drawn whether its first token is a candidate,
    and the output would be biased (:class:`.records.Draft`).
    """
    return draft.probs is None or draft.parents is None
