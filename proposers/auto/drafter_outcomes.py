# SPDX-License-Identifier: Apache-2.0
"""What became of a drafter's own draft, of which only a part was verified among other sources'.

The target's next tokens tell of all of it: a node that was left out of the tree is judged like one
that was in it. Where they agree to their end, nothing is told until the next ones are there: if
only what failed early were told early, deep nodes would seem better than they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_spec_ext.proposers.base import Draft, RequestStep, StepOutcome
from vllm_spec_ext.proposers.draft_tree import agreeing_path, parents_of


@dataclass(frozen=True)
class _Waiting:
    draft: Draft
    start: int  # tokens of the request when it was made


class DrafterOutcomes:
    """Of the last drafts of one drafter."""

    def __init__(self) -> None:
        """None yet."""
        self._waiting: dict[str, _Waiting] = {}

    def keep(self, requests: Sequence[RequestStep], drafts: Sequence[Draft]) -> None:
        """Drafts of this step; they take the places of earlier ones, whose end is not known."""
        for request, draft in zip(requests, drafts, strict=True):
            if len(draft):
                self._waiting[request.request_id] = _Waiting(draft, len(request.token_ids))

    def follow(self, requests: Sequence[RequestStep]) -> list[StepOutcome]:
        """Compare with what the target has said since; each draft whose end is known, once."""
        outcomes = []
        for request in requests:
            waiting = self._waiting.get(request.request_id)
            if waiting is None:
                continue
            said = request.token_ids[waiting.start :].tolist()
            parents = parents_of(waiting.draft)
            nodes = agreeing_path(waiting.draft.tokens.tolist(), parents, said)
            end = nodes[-1] if nodes else -1
            if len(nodes) == len(said) and end in parents:
                continue
            del self._waiting[request.request_id]
            outcomes.append(StepOutcome(request.request_id, len(waiting.draft), len(nodes), nodes))
        return outcomes

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
