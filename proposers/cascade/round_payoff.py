# SPDX-License-Identifier: Apache-2.0
"""Whether a round of reviews pays, for which requests, and how long a draft then may be.

In tokens, as of :mod:`vllm_spec_ext.proposers.payoff.forward_payoff`. What a draft token brings is
how often tokens at its depth were accepted by the target; what it costs is its verification and its
share of the passes. Rounds with a method's guesses for all requests need fewer passes than rounds
without, so both are kept apart. Nothing here depends on which tokens are drawn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_spec_ext.proposers.cascade.reviewer import Reviewer
from vllm_spec_ext.proposers.payoff.forward_payoff import Retries, TokenCosts, profit_by_depth
from vllm_spec_ext.proposers.payoff.level_rates import LevelRates

_WEIGHT = 0.2  # of a new observation in the means of rounds


@dataclass(frozen=True)
class Kind:
    """Requests of which the same is known."""

    is_guessed: bool  # a method has a guess for it
    is_drawn: bool


@dataclass(frozen=True)
class Plan:
    """What to draft in a step."""

    rows: Sequence[int]  # requests
    depth: int  # most tokens of each


@dataclass
class _Rounds:
    """Running means of one level."""

    passes: float  # of a round
    rows: float  # of a pass and request


class RoundPayoff:
    """Of one cascade, over all requests."""

    def __init__(
        self, reviewers: Mapping[int, Reviewer], chunks: Mapping[int, int], max_depth: int
    ) -> None:
        """Start from what is usual.

        Args:
            reviewers: By level.
            chunks: By level, the tokens that one review is meant for.
            max_depth: Most tokens of a draft.
        """
        self._reviewers = reviewers
        self._max_depth = max_depth
        self._chunks = chunks
        self._rates: dict[Kind, LevelRates] = {}
        self._retries = Retries()
        self._begin_anew()

    def plan(self, kinds: Mapping[int, Kind], unread: Mapping[int, int], costs: TokenCosts) -> Plan:
        """Which requests to draft for.

        Args:
            kinds: Of each request that has room.
            unread: Of each, the tokens since the last round that drafted for it.
            costs: Of the step.

        Returns:
            No requests where nothing pays; now and then one all the same, to see.
        """
        if not kinds:
            return Plan([], 0)
        everything = sorted(kinds)
        choices = [everything]
        for kind in set(kinds.values()):
            choices.append([row for row in everything if kinds[row] == kind])
        best, best_rows, best_depth = 0.0, everything[:0], 0
        for rows in choices:
            depth, profit = self._profit([kinds[row] for row in rows], costs)
            if profit > best:
                best, best_rows, best_depth = profit, rows, depth
        if best_rows:
            self._retries.pays()
            return Plan(best_rows, best_depth)
        if not self._could_pay(len(everything), costs):
            return Plan([], 0)
        if not self._retries.due():
            return Plan([], 0)
        # Rounds change only when one runs, so what is known of them may be of another text.
        self._begin_anew()
        for rates in self._rates.values():
            rates.doubt()
        # One that a method has a guess for tells most.
        row = min(everything, key=lambda row: (not kinds[row].is_guessed, unread[row]))
        return Plan([row], self._max_depth)

    def drafted(
        self, kinds: Sequence[Kind], passes: Sequence[tuple[int, int, int]], longest: int
    ) -> None:
        """Count a round.

        Args:
            kinds: Of its requests.
            passes: Level, rows and requests of each.
            longest: Tokens of its longest draft.
        """
        flag = all(kind.is_guessed for kind in kinds)
        if not longest:
            return
        self._length[flag] += _WEIGHT * (longest - self._length[flag])
        for level, known in self._rounds[flag].items():
            own = [(rows, number) for other, rows, number in passes if other == level]
            known.passes += _WEIGHT * (len(own) - known.passes)
            if own:
                mean = sum(rows for rows, _ in own) / sum(number for _, number in own)
                known.rows += _WEIGHT * (mean - known.rows)

    def verified(self, kind: Kind, num_drafted: int, num_accepted: int) -> None:
        """Count what the target made of a draft; with 0 drafted the round was in vain."""
        rates = self._rates_of(kind)
        for depth in range(min(max(num_drafted, 1), num_accepted + 1)):
            rates.observe(depth, depth < num_accepted)

    def _begin_anew(self) -> None:
        """Suppose what is usual until it is measured: half of each chunk of guesses is accepted."""
        self._length = {flag: float(self._max_depth) for flag in (True, False)}
        self._rounds = {
            True: {level: self._served(size / 2, size) for level, size in self._chunks.items()},
            False: {level: self._served(0.0, 0) for level in self._chunks},
        }

    def _served(self, num_accepted: float, num_read: int) -> _Rounds:
        """Rounds whose passes each read a root and a chunk, of which so much is accepted."""
        return _Rounds(max(1.0, self._max_depth / (1.0 + num_accepted)), 1.0 + num_read)

    def _rates_of(self, kind: Kind) -> LevelRates:
        return self._rates.setdefault(kind, LevelRates())

    def _profit(self, kinds: Sequence[Kind], costs: TokenCosts) -> tuple[int, float]:
        """Best depth, and the tokens that it earns."""
        gains = [0.0] * self._max_depth
        for kind in set(kinds):
            number, path, rates = kinds.count(kind), 1.0, self._rates_of(kind)
            for depth in range(self._max_depth):
                path *= rates.rate(depth)
                gains[depth] += number * max(0.0, path - costs.node)
        flag = all(kind.is_guessed for kind in kinds)
        return self._after_costs(
            gains, len(kinds), costs, self._rounds[flag], max(1.0, self._length[flag] - 1.0)
        )

    def _could_pay(self, num_requests: int, costs: TokenCosts) -> bool:
        """Whether it would pay if all were accepted, by the reviewers as by the target."""
        gains = [num_requests * max(0.0, 1.0 - costs.node)] * self._max_depth
        rounds = {level: self._served(size, size) for level, size in self._chunks.items()}
        behind = max(1.0, self._max_depth - 1.0)
        return self._after_costs(gains, num_requests, costs, rounds, behind)[1] > 0.0

    def _after_costs(
        self,
        gains: Sequence[float],
        num_requests: int,
        costs: TokenCosts,
        rounds: Mapping[int, _Rounds],
        behind: float,
    ) -> tuple[int, float]:
        """Best depth, and the tokens that it earns after these rounds.

        Args:
            gains: [max_depth] tokens that each depth adds.
            num_requests: Of the round.
            costs: Of the step.
            rounds: By level.
            behind: Tokens of such a draft behind its first one.
        """
        first = further = 0.0
        for level, known in rounds.items():
            rows = max(1, round(num_requests * known.rows))
            seconds = self._reviewers[level].forward_seconds(rows)
            cost = costs.in_tokens(seconds)
            if cost is None:  # nothing is held back
                depth = sum(gain > 0.0 for gain in gains)
                return depth, math.inf if depth else 0.0
            # approximation: passes grow evenly with the length of the draft behind its first token.
            first += cost * min(1.0, known.passes)
            further += cost * max(0.0, known.passes - 1.0) / behind
        return profit_by_depth(gains, first, further)
