# SPDX-License-Identifier: Apache-2.0
"""What became of drafts that were not verified, or in part: it shows as the target goes on.

Its next tokens tell of all of a draft: a node that was left out is judged like one that was not.
Where they agree to their end, nothing is told until the next ones are there: if only what failed
early were told early, deep nodes would seem better than they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_spec_ext.proposers.draft_tree import agreeing_path, parents_of
from vllm_spec_ext.proposers.records import Draft, RequestStep, StepOutcome


@dataclass
class _Followed:
    tokens: list[int]
    parents: list[int]
    start: int  # tokens of the request when it was made
    accepted: int = 0  # so far


class FollowedDrafts:
    """At most one of each request."""

    def __init__(self) -> None:
        """None yet."""
        self._followed: dict[str, _Followed] = {}

    def __bool__(self) -> bool:
        """Whether there are some whose end is not known."""
        return bool(self._followed)

    def keep(self, requests: Sequence[RequestStep], drafts: Sequence[Draft]) -> None:
        """Follow these from now on, in the places of earlier ones; nobody asks for empty ones."""
        for request, draft in zip(requests, drafts, strict=True):
            if len(draft):
                self._followed[request.request_id] = _Followed(
                    draft.tokens.tolist(), parents_of(draft), len(request.token_ids)
                )

    def follow(self, requests: Sequence[RequestStep]) -> list[StepOutcome]:
        """Compare with what the target said since; outcomes of drafts whose end is known now."""
        outcomes = []
        for request in requests:
            draft = self._followed.get(request.request_id)
            if draft is None:
                continue
            said = request.token_ids[draft.start :].tolist()
            nodes = agreeing_path(draft.tokens, draft.parents, said)
            draft.accepted = len(nodes)
            end = nodes[-1] if nodes else -1
            if len(nodes) == len(said) and end in draft.parents:
                continue
            del self._followed[request.request_id]
            outcomes.append(StepOutcome(request.request_id, len(draft.tokens), len(nodes), nodes))
        return outcomes

    def forget(self, request_ids: Iterable[str]) -> int:
        """Requests that are gone; returns how many of their tokens were accepted until then."""
        gone = (self._followed.pop(request_id, None) for request_id in request_ids)
        return sum(draft.accepted for draft in gone if draft is not None)
