# SPDX-License-Identifier: Apache-2.0
"""Whether one more forward pass of a draft model saves more time than it takes.

One unit throughout: the *token*, the time in which the engine emits one at present. What a pass
adds is the number of draft tokens that will be accepted thanks to it, over all requests that it
serves; what it costs is its seconds divided by the seconds of a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_spec_ext.proposers.records import StepContext

_MEMORY = 0.95  # how much of the past survives one more step
_FIRST_INTERVAL, _LAST_INTERVAL = 32, 512  # steps from one try to the next
_PROVEN = 32  # steps in a row in which a model pays until the next try would come soon again


@dataclass(frozen=True)
class TokenCosts:
    """What things cost in one step; None = not known, so nothing is held back."""

    token_seconds: float | None = None  # in which the engine emits one token, of any request
    min_probability: float | None = None  # tokens that verifying one more draft token costs

    def in_tokens(self, seconds: float | None) -> float | None:
        """A time as a number of tokens; None if it or the time of a token is not known."""
        if seconds is None or self.token_seconds is None:
            return None
        return seconds / self.token_seconds

    @property
    def node(self) -> float:
        """Tokens that the verification of one draft token costs; 0 while that is not known."""
        return self.min_probability or 0.0


class TokenSeconds:
    """Learns what a token is worth: the time of a step over the tokens that it emits."""

    def __init__(self) -> None:
        """Nothing is known; plain decoding sets the value."""
        self._weight = self._emitted = self._drafted = self._drafting = 0.0
        self._num_verified = 0  # draft tokens since the last step began
        self._spent = 0.0  # seconds since then

    def begin(self, step: StepContext) -> TokenCosts:
        """Count the step that ends with this context; the costs of the next one."""
        num_requests = len(step.requests)
        if num_requests:
            emitted = sum(len(request.new_tokens) for request in step.requests)
            num_steps = sum(request.num_steps for request in step.requests)
            self.observe(num_steps, emitted, self._num_verified, self._spent)
        self._num_verified, self._spent = 0, 0.0
        return self.costs(num_requests, step.plain_seconds, step.min_probability)

    def verified(self, num_drafted: int) -> None:
        """Draft tokens were verified in the step that is about to end."""
        self._num_verified += num_drafted

    def spend(self, seconds: float) -> None:
        """A pass for drafts took this long, as measured for such passes."""
        self._spent += seconds

    def observe(
        self, num_requests: int, num_emitted: int, num_drafted: int, drafting_seconds: float
    ) -> None:
        """Count a step.

        Args:
            num_requests: That got tokens; one that got them in several steps counts as many times.
            num_emitted: Tokens of all of them.
            num_drafted: Draft tokens that were verified.
            drafting_seconds: What it took to make these.
        """
        self._weight = self._weight * _MEMORY + num_requests
        self._emitted = self._emitted * _MEMORY + num_emitted
        self._drafted = self._drafted * _MEMORY + num_drafted
        self._drafting = self._drafting * _MEMORY + drafting_seconds * num_requests

    def costs(
        self, num_requests: int, plain_seconds: float | None, min_probability: float | None
    ) -> TokenCosts:
        """Costs at a batch size.

        A step takes S = plain + drafting + drafted * min_probability * T, where T = S / emitted is
        the value of a token; hence T. Where drafting loses time, plain decoding sets the value.

        Args:
            num_requests: Of the batch.
            plain_seconds: A plain step at this size; None if not known.
            min_probability: As of the step context.
        """
        if plain_seconds is None or plain_seconds <= 0.0 or num_requests < 1:
            return TokenCosts(None, min_probability)
        plain = plain_seconds / num_requests
        if not self._weight:
            return TokenCosts(plain, min_probability)
        emitted, drafted = self._emitted / self._weight, self._drafted / self._weight
        drafting = self._drafting / self._weight
        left = num_requests * (emitted - drafted * (min_probability or 0.0))
        value = (plain_seconds + drafting) / left if left > 0.0 else plain
        return TokenCosts(min(plain, value), min_probability)


def profit_by_depth(
    level_gains: Sequence[float], first_cost: float, further_cost: float
) -> tuple[int, float]:
    """How deep to draft, and what that earns; ``(0, 0.0)`` if no depth pays.

    Args:
        level_gains: [depth] tokens that each level adds, its verification taken off.
        first_cost: Tokens that the pass for the first level costs.
        further_cost: Each further pass.
    """
    best, best_depth, earned = 0.0, 0, -first_cost
    for depth, gain in enumerate(level_gains, 1):
        earned += gain - (further_cost if depth > 1 else 0.0)
        if earned > best:
            best, best_depth = earned, depth
    return best_depth, best


def paying(gains: Sequence[float], cost: Callable[[int], float | None]) -> list[int]:
    """Which of these branches one pass should read, in their order; none if it does not pay.

    Args:
        gains: [n] tokens that reading each branch adds.
        cost: Tokens that a pass over so many branches costs; None if not known, then all are read.
    """
    order = sorted(range(len(gains)), key=lambda i: -gains[i])
    best, best_count, gained = 0.0, 0, 0.0
    for count, index in enumerate(order, 1):
        gained += gains[index]
        spent = cost(count)
        if spent is None:
            return list(range(len(gains)))
        if gained - spent > best:
            best, best_count = gained - spent, count
    return sorted(order[:best_count])


class Retries:
    """When a model that does not pay is tried again: seldom, and ever more seldom."""

    def __init__(self) -> None:
        """The first try comes soon."""
        self._interval = _FIRST_INTERVAL
        self._waited = 0
        self._paid = 0

    def pays(self) -> None:
        """Count a step in which it pays, by what is known; which may be a lucky try."""
        self._waited = 0
        self._paid += 1
        if self._paid >= _PROVEN:
            self._interval = _FIRST_INTERVAL

    def due(self) -> bool:
        """Count a step in which it does not pay; whether to try in this one all the same."""
        self._paid = 0
        self._waited += 1
        if self._waited < self._interval:
            return False
        self._waited = 0
        self._interval = min(2 * self._interval, _LAST_INTERVAL)
        return True
