# SPDX-License-Identifier: Apache-2.0
"""Whether the target should draft for itself now, for whom, and how far.

A pass over a view pays where KV takes more of a step than the weights: with long contexts, and
with many requests. So the gate weighs what each level of a draft is likely to add, less its
verification, against what the pass takes of a plain step at these contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_spec_ext.proposers.base import RequestStep, StepContext, StepOutcome, TargetView
from vllm_spec_ext.proposers.cache_view.fixed_cost import FixedCost
from vllm_spec_ext.proposers.payoff.forward_payoff import Retries, TokenSeconds, profit_by_depth
from vllm_spec_ext.proposers.payoff.level_rates import LevelRates


@dataclass(frozen=True)
class Kind:
    """Drafts that are accepted alike."""

    is_partial: bool  # something is hidden
    is_drawn: bool


@dataclass(frozen=True)
class Decision:
    """What to draft in a step."""

    rows: Sequence[int]  # requests; none = nothing
    depth: int  # passes
    reason: str


class ViewGate:
    """Of one engine's view."""

    def __init__(self, view: TargetView, max_depth: int, is_adaptive: bool) -> None:
        """Start from what is usual.

        Args:
            view: Over which the target drafts.
            max_depth: Most draft tokens of a request.
            is_adaptive: Whether anything is held back.
        """
        self._view = view
        self._max_depth = max_depth
        self._is_adaptive = is_adaptive
        self.fixed = FixedCost(view.reads)
        # Acceptance does not fall with depth, so one rate tells of all levels. What hides nothing
        # is the target itself.
        self._rates = {
            Kind(is_partial, is_drawn): LevelRates(0.8 if is_partial else 0.97, num_depths=1)
            for is_partial in (False, True)
            for is_drawn in (False, True)
        }
        self._value = TokenSeconds()
        self._retries = Retries()
        self._pending: dict[str, Kind] = {}

    def kind(self, request: RequestStep, is_drawn: bool) -> Kind:
        """Of a request's draft."""
        return Kind(self._hidden(request) > 0, is_drawn)

    def decide(self, step: StepContext, rows: Sequence[int], kinds: Sequence[Kind]) -> Decision:
        """How many levels to draft.

        Args:
            step: Of all requests.
            rows: Those that could be drafted for.
            kinds: Of their drafts.
        """
        num_requests, total = len(step.requests), _total_tokens(step)
        costs = self._value.begin(step)
        if not rows:
            return Decision((), 0, "no request has room")
        if not self._is_adaptive:
            return Decision(rows, self._max_depth, "adaptive_length is off")
        if not any(kind.is_partial for kind in kinds):
            return Decision((), 0, "no request is longer than the view")
        plain = costs.in_tokens(step.plain_seconds)
        if plain is None:
            return Decision(rows, self._max_depth, "plain steps are not measured")
        # What reading the KV of one token in sight takes of a plain step.
        of_token = 1.0 / (self.fixed.tokens(num_requests) + total)
        paying = [
            (row, kind)
            for row, kind in zip(rows, kinds, strict=True)
            if self._rates[kind].rate(0) - costs.node > plain * of_token * self._seen(step, [row])
        ]
        if not any(kind.is_partial for _, kind in paying):
            paying = []
        share = self.fixed.share(num_requests, total, self._seen(step, [row for row, _ in paying]))
        gains = [0.0] * self._max_depth
        for row, kind in paying:
            reached = 1.0
            for level in range(min(self._max_depth, step.requests[row].room)):
                reached *= self._rates[kind].rate(level)
                gains[level] += reached - costs.node
        depth, profit = profit_by_depth(gains, plain * share, plain * share)
        state = f"a pass takes {share:.2f} of a plain step"
        if depth:
            self._retries.pays()
            return Decision([row for row, _ in paying], depth, f"{profit:.2f} tokens more; {state}")
        if self._retries.due():
            for kind in set(kinds):
                self._rates[kind].doubt()
            hidden = {row: self._hidden(step.requests[row]) for row in rows}
            return Decision([max(rows, key=hidden.__getitem__)], 1, f"a try; {state}")
        return Decision((), 0, f"no depth pays; {state}")

    def drafted(
        self, step: StepContext, rows: Sequence[int], kinds: Sequence[Kind], num_passes: int
    ) -> None:
        """Count what drafting took, and remember what is to be verified."""
        for row, kind in zip(rows, kinds, strict=True):
            self._pending[step.requests[row].request_id] = kind
        seconds = self._view.forward_seconds(len(rows))
        if seconds is None or not num_passes:
            return
        self._value.spend(num_passes * seconds)
        if step.plain_seconds:
            share = seconds / step.plain_seconds
            total, seen = _total_tokens(step), self._seen(step, rows)
            self.fixed.observe(len(step.requests), total, seen, share)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn how far a draft was right."""
        self._value.verified(outcome.num_verified)
        kind = self._pending.pop(outcome.request_id, None)
        if kind is None:
            return
        for level in range(min(outcome.num_drafted, outcome.num_accepted + 1)):
            self._rates[kind].observe(level, level < outcome.num_accepted)

    def forget(self, request_id: str) -> None:
        """The outcome of a request's draft will not come."""
        self._pending.pop(request_id, None)

    def _hidden(self, request: RequestStep) -> int:
        length = len(request.token_ids)
        return length - self._view.seen(length)

    def _seen(self, step: StepContext, rows: Sequence[int]) -> int:
        """Tokens whose KV a pass for these requests reads."""
        return sum(self._view.seen(len(step.requests[row].token_ids)) for row in rows)


def _total_tokens(step: StepContext) -> int:
    """Tokens whose KV a plain step reads."""
    return sum(len(request.token_ids) for request in step.requests)
