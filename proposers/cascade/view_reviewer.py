# SPDX-License-Identifier: Apache-2.0
"""The target over a view of its own KV cache, as the last level of a cascade.

Nothing above this level but the target itself rejects what it accepted, so it is never taken back
below its last pass, which is all that a view can take back.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_spec_ext.proposers.cascade.reviewer import ReviewRound
from vllm_spec_ext.proposers.records import RequestStep
from vllm_spec_ext.proposers.views import TargetView, ViewRound

if TYPE_CHECKING:
    import torch


class ViewReviewer:
    """Implements :class:`vllm_spec_ext.proposers.cascade.reviewer.Reviewer`."""

    def __init__(self, view: TargetView) -> None:
        """Review with a view."""
        self._view = view
        self.name = view.spec.name

    def begin(
        self, requests: Sequence[RequestStep], rows: Sequence[int], room: Sequence[int]
    ) -> ReviewRound:
        """See :meth:`.reviewer.Reviewer.begin`; the target's blocks bound the view's room."""
        return _ReviewedView(self._view.begin(requests, rows), rows)

    def forward_seconds(self, num_rows: int) -> float | None:
        """See :meth:`.reviewer.Reviewer.forward_seconds`."""
        return self._view.forward_seconds(num_rows)

    def hides(self, length: int) -> bool:
        """Whether a request of this length is seen in part; else a pass is a step of the target."""
        return self._view.seen(length) < length


class _ReviewedView:
    """A round of the view, which has its own list of requests and one tensor for all of them."""

    def __init__(self, round_: ViewRound, rows: Sequence[int]) -> None:
        self._round = round_
        place_of = {row: place for place, row in enumerate(rows)}
        self._places = [place_of[row] for row in round_.rows]
        self._num_requests = len(rows)
        # Of those that take part, tokens that they had read before their last pass, and in it.
        self._before = [0] * len(self._places)
        self._last = [0] * len(self._places)

    def run(self, tokens: Sequence[Sequence[int]]) -> "list[torch.Tensor | None]":
        """See :meth:`.reviewer.ReviewRound.run`."""
        feeds: list[Sequence[int]] = []
        for member, (place, room) in enumerate(zip(self._places, self._round.rooms, strict=True)):
            read = self._before[member] + self._last[member]
            # The root needs no room.
            fits = read + len(tokens[place]) - 1 <= room
            feeds.append(tokens[place] if fits else ())
            self._before[member], self._last[member] = read, len(feeds[-1])
        found: list[torch.Tensor | None] = [None] * self._num_requests
        if any(self._last):
            logits = self._round.run(feeds).split(self._last)
            for place, own in zip(self._places, logits, strict=True):
                found[place] = own if len(own) else None
        return found

    def keep(self, counts: Sequence[int]) -> None:
        """See :meth:`.reviewer.ReviewRound.keep`."""
        kept = [
            counts[place] - before for place, before in zip(self._places, self._before, strict=True)
        ]
        self._round.keep(kept)
        self._last = kept
