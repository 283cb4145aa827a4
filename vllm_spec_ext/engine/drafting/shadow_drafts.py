# SPDX-License-Identifier: Apache-2.0
"""Drafts that are never verified: what the target would have accepted shows as it goes on.

A method that loses time is asked for such drafts now and then. They cost what drafting costs, not
a longer step of the target, and tell as much: the proposer hears of them like of others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vllm_spec_ext.proposers.base import Draft, RequestStep, StepOutcome
from vllm_spec_ext.proposers.followed_drafts import FollowedDrafts

MOST_TOKENS = 8  # of a request; to be followed over as many steps


@dataclass(frozen=True)
class ShadowResult:
    """What a step with shadow drafts would have given."""

    num_requests: int
    num_drafted: int
    num_accepted: int


class ShadowDrafts:
    """Those of one step; the next ones are made when all of them are known."""

    def __init__(self) -> None:
        """None yet."""
        self._followed = FollowedDrafts()
        self._is_open = False  # the whole is not told yet
        self._superseded: set[str] = set()  # requests that were drafted for since
        self._num_requests = self._num_drafted = self._num_accepted = 0

    def __bool__(self) -> bool:
        """Whether there are some whose outcome was not told yet."""
        return self._is_open

    def keep(self, requests: Sequence[RequestStep], drafts: Sequence[Draft]) -> None:
        """Follow these from now on; the end of empty ones is known."""
        self._followed.keep(requests, drafts)
        self._superseded.clear()
        self._is_open = True
        self._num_requests = len(requests)
        self._num_drafted = sum(map(len, drafts))
        self._num_accepted = 0

    def follow(
        self, requests: Sequence[RequestStep]
    ) -> tuple[list[StepOutcome], ShadowResult | None]:
        """Compare with what the target said since.

        Returns:
            Outcomes of the drafts whose end is known now, for the proposer; and the whole, once all
            are.
        """
        if not self._is_open:
            return [], None
        outcomes = self._followed.follow(requests)
        self._num_accepted += sum(outcome.num_accepted for outcome in outcomes)
        outcomes = [
            replace(outcome, is_shadow=True)
            for outcome in outcomes
            if outcome.request_id not in self._superseded
        ]
        if self._followed:
            return outcomes, None
        self._is_open = False
        return outcomes, ShadowResult(self._num_requests, self._num_drafted, self._num_accepted)

    def supersede(self, request_ids: Iterable[str]) -> None:
        """Requests are drafted for anew: by an outcome the proposer would understand that draft."""
        self._superseded.update(request_ids)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone: what they had accepted until then is all that is known."""
        self._num_accepted += self._followed.forget(request_ids)
