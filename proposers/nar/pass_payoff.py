# SPDX-License-Identifier: Apache-2.0
"""Whether the one pass that drafts for all requests saves more time than it takes."""

from vllm_spec_ext.proposers.payoff.forward_payoff import Retries, TokenCosts, TokenSeconds
from vllm_spec_ext.proposers.records import StepContext, StepOutcome

_MEMORY = 0.98  # of what drafts gave: what remains after one more
_PRIOR, _STRENGTH = 1.0, 4.0  # accepted tokens of a draft, trusted like so many drafts


class PassPayoff:
    """Learns what a draft gives on average, over all requests."""

    def __init__(self) -> None:
        """Nothing is known, so a pass pays."""
        self._value = TokenSeconds()
        self._retries = Retries()
        self._costs = TokenCosts()
        self._drafts = self._accepted = self._drafted = 0.0

    def begin(self, step: StepContext) -> None:
        """Count the last step, and take the costs of this one."""
        self._costs = self._value.begin(step)

    def pays(self, num_requests: int, seconds: float | None) -> bool:
        """Whether to run a pass for so many requests; now and then one that does not pay.

        Args:
            num_requests: To draft for.
            seconds: That the pass will take; None if not known.
        """
        cost = self._costs.in_tokens(seconds)
        if cost is None or num_requests * self._gain > cost:
            self._retries.pays()
            return True
        return self._retries.due()

    def ran(self, seconds: float | None) -> None:
        """A pass was run."""
        self._value.spend(seconds or 0.0)

    def observe(self, outcome: StepOutcome) -> None:
        """What became of a draft."""
        self._value.verified(outcome.num_verified)
        self._drafts = self._drafts * _MEMORY + 1.0
        self._drafted = self._drafted * _MEMORY + outcome.num_drafted
        self._accepted = self._accepted * _MEMORY + outcome.num_accepted

    @property
    def _gain(self) -> float:
        """Tokens that a request's draft gives, its verification taken off."""
        known = self._drafts + _STRENGTH
        accepted = (self._accepted + _PRIOR * _STRENGTH) / known
        return accepted - self._costs.node * self._drafted / known
