# SPDX-License-Identifier: Apache-2.0
"""How much the next step may draft, so that drafting never costs more than a little.

A ledger beside plain decoding. A step earns the steps that its accepted tokens save, and costs
what verification and drafting add to a plain step; a step without drafts costs what the proposer
takes to read the new tokens. Over no 200 steps more may be lost than ``_LIMIT`` of them take in
plain decoding, in a fresh engine less: a draft is allowed if that holds even when all of it is
rejected.

How much of what may still be lost is put at stake, and how soon it is given back, follows what
drafts earned lately and in the long run (:mod:`.gain_record`). Where they lose, and at first in a
fresh engine, the proposer is asked for *shadow* drafts now and then (:mod:`.shadow_drafts`), which
show what they would have earned without the cost of verification.
The less may still be lost, the surer a proposer must be of a token. Where they lose, the proposer
*rests*, too: it reads the new tokens of several steps at once.

No clock here: times are given.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_spec_ext.engine.drafting.branch_cost import BranchCost
from vllm_spec_ext.engine.drafting.gain_record import GainRecord
from vllm_spec_ext.engine.drafting.loss_window import NUM_STEPS, LossWindow
from vllm_spec_ext.engine.drafting.step_costs import CostEstimate, StepCosts

_LIMIT = 2.7  # plain steps: what may be lost over 200 steps, 0.98 of plain speed less a margin
_LEAST_LIMIT = 1.2
_FIRST_LIMIT = 0.6  # the same of a fresh engine
_FIRST_STEPS = 50
_CAUTION = 1.5  # standard errors that estimated costs are raised by
_AMPLE = 0.6  # of the limit; with less, drafts must be surer
_SURE = 0.4
# Of what is at stake, the part that one step may lose if drafts earn nothing: of one request; of
# more it grows as their root, as the drafts of many seldom all fail, up to the second.
_AT_ONCE, _MOST_AT_ONCE = 0.3, 0.7
_DOUBT = 0.1  # plain steps a step: loss from which on nothing is put at stake
# Of what drafts earned lately, and of what they earn for sure, a step: how soon a method is back.
_RETURN, _SURE_RETURN = 0.2, 0.4
_RETURNED = 0.6  # plain steps: up to there
_SHADOW = 0.002  # plain steps a step: what shadow drafts may cost
_SAVED_SHADOW = 0.2  # plain steps: of that, what is saved up for dear ones, and a fresh engine has
_FIRST_SHADOWS = 6  # outcomes before which shadow drafts go first, if they can be paid for
# Weight of a step with shadow drafts in the short memory: for each request, and at most.
_SHADOW_WEIGHT, _MOST_SHADOW_WEIGHT = 0.03, 0.25
_RESTS = 7  # steps in a row whose tokens are read later

_FIRST_DRAFTING = 0.1  # drafting of a step in plain steps, before it was measured
_FIRST_USUAL = 0.25  # plain steps: the most that a first drafting is taken for
_PAUSE = 4.0  # times the usual drafting time; the rest is a pause
_FIRST_PAUSE = 0.5  # plain steps; the same before anything is usual

_KNOWN = 6  # steps with drafts after which nodes are told from branches
_MOST_ASKED = 8  # times that a plain step is asked for in vain: all steps may have prefill
_SELDOM, _OFTEN = 64, 10  # steps from one plain step to the next while the method drafts always


@dataclass(frozen=True)
class Allowance:
    """What the next step may draft."""

    max_tokens: int | None
    """Draft tokens of all requests together; None = no limit."""
    min_probability: float | None
    """Acceptance probability below which a token costs more than it saves, first by costs that are
    guessed; None = not known."""
    reason: str
    fixed_cost: float | None = None
    """Tokens that any draft at all costs, beside that probability for each; None = not known."""
    branch_cost: float | None = None
    """Tokens that each branch of a tree costs beside its nodes; None = not known."""
    is_shadow: bool = False
    """Drafts may be made, but not verified; :class:`.shadow_drafts.ShadowDrafts` follows them."""
    may_rest: bool = False
    """The tokens of the next steps may be read later, as nothing will be drafted for a while."""


UNLIMITED = Allowance(None, None, "adaptive_length is off")


def shares(max_tokens: int, rooms: Sequence[int], first: int = 0) -> list[int]:
    """Divide draft tokens among requests: equally, as far as each has room.

    Args:
        max_tokens: All together.
        rooms: [num_requests] most tokens of each request.
        first: Request that the remainder begins with.
    """
    given = [0] * len(rooms)
    order = [(first + i) % len(rooms) for i in range(len(rooms))]
    while max_tokens > 0:
        open_rows = [row for row in order if given[row] < rooms[row]]
        if not open_rows:
            break
        each = max(1, max_tokens // len(open_rows))
        for row in open_rows:
            added = min(each, rooms[row] - given[row], max_tokens)
            given[row] += added
            max_tokens -= added
    return given


class DraftBudget:
    """The ledger of one engine."""

    def __init__(self, can_rest: bool = False) -> None:
        """Start with the little that a fresh engine may lose.

        Args:
            can_rest: The proposer may read the tokens of some steps later, see :meth:`rested`.
        """
        self.costs = StepCosts()
        self.branches = BranchCost()
        self._window = LossWindow()
        self._num_steps = 0
        self._drafting: dict[tuple[str, int], float] = {}  # usual seconds by method, size class
        self._shadowing: dict[tuple[str, int], float] = {}  # the same of shadow drafts
        self._idle: dict[tuple[str, int], float] = {}  # the same where nothing may be drafted
        self._resting: dict[int, float] | None = {} if can_rest else None  # where nothing is read
        self._rests_left = 0
        self._plain_s: float | None = None  # at the size of the last step
        self._size_class = 0
        self._may_draft = self._is_shadow = False
        self._since_plain = 0
        self._asked_plain = 0
        self._gains = GainRecord()
        self._shadow = _SAVED_SHADOW
        self._emitted = self._requests = self._verified = 0.0  # running sums

    @property
    def balance(self) -> float:
        """Plain steps, of the size of the last one, that may still be lost."""
        lost = self._window.lost
        return self._limit - (lost / self._plain_s if self._plain_s else 0.0)

    @property
    def _limit(self) -> float:
        """The same, had nothing been lost: a share of what plain decoding takes for the window."""
        if self._plain_s is None:
            return _FIRST_LIMIT
        if self._num_steps < _FIRST_STEPS:
            return _FIRST_LIMIT * self._usual(self._plain_s)
        return max(_LEAST_LIMIT * self._usual(self._plain_s), self._beside_reading(self._plain_s))

    def _usual(self, plain_s: float) -> float:
        """What plain decoding takes for a step of the window, in steps that take `plain_s`."""
        return (self._window.mean_plain or plain_s) / plain_s

    def _beside_reading(self, plain_s: float) -> float:
        """What may be lost over the window beside what reading and shadow drafts take."""
        usual = self._usual(plain_s)
        return _LIMIT * usual - NUM_STEPS * (self._least_idle / plain_s + _SHADOW * usual)

    @property
    def _usual_idle(self) -> float:
        """Seconds of a step in which the proposer reads, but may not draft."""
        size = self._size_class
        return sum(s for (_, known), s in self._idle.items() if known == size)

    @property
    def _least_idle(self) -> float:
        """Seconds a step if from now on nothing is drafted; the ledger counts what is above."""
        idle = self._usual_idle
        if self._resting is None:
            return idle
        return (idle + _RESTS * self._resting.get(self._size_class, 0.0)) / (_RESTS + 1)

    def verified(
        self,
        num_requests: int,
        num_drafted: int,
        num_emitted: int,
        seconds: float | None,
        num_branches: int = 0,
    ) -> None:
        """Count what a step gave and what verification took.

        Args:
            num_requests: Requests that got tokens.
            num_drafted: Draft tokens of all requests that were verified.
            num_emitted: Tokens of the step, bonus tokens included.
            seconds: The step up to here; None if it had prefill tokens, too.
            num_branches: Of the drafts that were verified.
        """
        if num_requests < 1:
            return
        self._count_tokens(num_requests, num_drafted, num_emitted)
        if seconds is not None:
            self._observe_costs(num_requests, num_drafted, num_branches, seconds)
            self._since_plain = self._since_plain + 1 if num_drafted else 0
            if not num_drafted:
                self._asked_plain = 0
        found = self.costs.estimate(num_requests)
        if found is None:
            return
        self._plain_s, self._size_class = found.plain_s, num_requests.bit_length()
        self._num_steps += 1
        if num_drafted:
            cost = _careful(found, num_drafted) + self.branches.extra(num_branches)
            gain = num_emitted / num_requests - 1.0 - cost
            self._window.add(gain * found.plain_s)
            self._earned(gain, num_requests, found.plain_s)
        elif self.balance < _RETURNED:
            returned = min(self._coming_back, _RETURNED - self.balance)
            self._window.add(returned * found.plain_s)

    def _observe_costs(
        self, num_requests: int, num_drafted: int, num_branches: int, seconds: float
    ) -> None:
        """Tell what branches took from what nodes did."""
        found = self.costs.estimate(num_requests)
        if found is not None:
            if found.num_measured >= _KNOWN:
                unexplained = seconds / found.plain_s - 1.0 - found.extra(num_drafted)
                if not self.branches.observe(num_branches, unexplained):
                    return
            seconds -= self.branches.extra(num_branches) * found.plain_s
        self.costs.observe(num_requests, num_drafted, seconds)

    def shadowed(self, num_requests: int, num_drafted: int, num_accepted: int) -> None:
        """Learn what drafts would have given that were not verified.

        Args:
            num_requests: Of their step.
            num_drafted: Tokens of all of them.
            num_accepted: Of these, what the target said as well.
        """
        found = self.costs.estimate(num_requests)
        if num_drafted and found is not None:
            gain = num_accepted / num_requests - found.extra(num_drafted)
            # Seldom, and as much as pays: it says more than drafts that were held short.
            weight = min(_MOST_SHADOW_WEIGHT, _SHADOW_WEIGHT * num_requests)
            self._earned(gain, num_requests, found.plain_s, weight)

    def _earned(
        self, gain: float, num_requests: int, plain_s: float, least_weight: float = 0.0
    ) -> None:
        """Remember what the drafts of a step gave, less what drafting takes."""
        drafting = self._usual_drafting(num_requests, plain_s)
        self._gains.add(gain - drafting, drafting, least_weight)

    def drafted(self, seconds: Mapping[str, float]) -> None:
        """Count what drafting took after that, by method; the step is over."""
        if self._plain_s is None:
            return
        for method, taken in seconds.items():
            key = method, self._size_class
            if not self._may_draft:
                idle = self._idle.get(key)
                # Pauses only make it longer, so it follows what is short faster.
                weight = 1.0 if idle is None else 0.2 if taken < idle else 0.02
                self._idle[key] = (1 - weight) * (idle or 0.0) + weight * taken
                continue
            # What is dear is left out of shadow drafts, so they do not tell what is usual.
            known = self._shadowing if self._is_shadow else self._drafting
            usual = known.get(key)
            pause = _FIRST_PAUSE * self._plain_s if usual is None else _PAUSE * usual
            counted = min(taken, max(pause, 0.01 * self._plain_s))
            if usual is None:  # a first one finds its buffers and caches, and says little
                known[key] = min(counted, _FIRST_USUAL * self._plain_s)
            else:
                weight = 0.4 if counted < usual else 0.2
                known[key] = usual + weight * (counted - usual)
            if not self._is_shadow:
                self._window.add(-max(0.0, counted - self._least_idle))
        if not self._may_draft or self._is_shadow:
            self._window.add(self._least_idle - self._usual_idle)
        self._window.end_step(self._plain_s)

    def may_rest(self) -> bool:
        """Whether the tokens of this step may be read later; then :meth:`rested` comes next."""
        return self._rests_left > 0

    def rested(self, num_requests: int, step_seconds: float, seconds: float) -> None:
        """Count a step in which nothing was read; no other method is called for it.

        Args:
            num_requests: As in the step before.
            step_seconds: The step up to here.
            seconds: What it took from there on all the same.
        """
        assert self._resting is not None
        assert self._plain_s is not None
        self.costs.observe(num_requests, 0, step_seconds)
        self._count_tokens(num_requests, 0, num_requests)
        self._rests_left -= 1
        self._num_steps += 1
        self._shadow += _SHADOW
        usual = self._resting.get(self._size_class, seconds)
        # Pauses only make it longer, as with idle steps.
        weight = 0.2 if seconds < usual else 0.02
        self._resting[self._size_class] = usual + weight * (seconds - usual)
        self._window.add(self._least_idle - usual)
        self._window.end_step(self._plain_s)

    def allow(self, rooms: Sequence[int], is_following: bool = False) -> Allowance:
        """Decide on the next drafts.

        Args:
            rooms: [num_requests] draft tokens that each request has room for; 0 = none.
            is_following: Shadow drafts are still being followed.
        """
        allowance = self._decide(rooms)
        if allowance.max_tokens == 0 or allowance.is_shadow:
            most = max(_SAVED_SHADOW, self._shadow_cost(len(rooms)))
            self._shadow = min(most, self._shadow + _SHADOW)
        if allowance.is_shadow:
            if is_following or not any(rooms):
                allowance = replace(allowance, max_tokens=0, is_shadow=False)
            else:
                self._shadow -= self._shadow_cost(len(rooms))
        self._is_shadow = allowance.is_shadow
        self._rests_left = _RESTS if allowance.may_rest else 0
        self._may_draft = allowance.max_tokens != 0 and any(rooms)
        return allowance

    @property
    def is_idle(self) -> bool:
        """Nothing is drafted in this step, and what the target says of other rows is of no use."""
        return not self._may_draft

    def plain_seconds(self, num_requests: int) -> float | None:
        """A plain step of so many requests; None while that is not known."""
        found = self.costs.estimate(num_requests) if num_requests else None
        return None if found is None else found.plain_s

    def _decide(self, rooms: Sequence[int]) -> Allowance:
        total, num_requests = sum(rooms), len(rooms)
        found = self.costs.estimate(num_requests) if num_requests else None
        if found is None:
            return Allowance(0, None, "measuring plain steps first")
        if self.costs.needs_plain(num_requests) and self._asked_plain < _MOST_ASKED:
            self._asked_plain += 1
            return Allowance(0, None, f"measuring plain steps with {num_requests} requests")
        drafting = self._usual_drafting(num_requests, found.plain_s)
        value = self._token_value(found, num_requests, drafting)
        # Drafts made in hope may lose time: none are, where reading alone uses up what may be lost.
        may_hope = self._beside_reading(found.plain_s) > _LEAST_LIMIT * self._usual(found.plain_s)
        per_token = found.hoped_per_token if may_hope else found.per_token
        break_even = min(1.0, per_token * value)
        fixed = max(0.0, found.extra(1) - found.per_token) * value
        branch = self.branches.extra(1) * value
        missing = max(0.0, 1.0 - self.balance / (_AMPLE * self._limit))
        probability = break_even + (1.0 - break_even) * _SURE * missing
        interval = min(_SELDOM, max(_OFTEN, int(200 * self._gains.lately)))
        if self._since_plain >= interval:
            self._since_plain = 0
            return Allowance(0, probability, "a plain step, to compare with", fixed, branch)
        if not total:
            return Allowance(None, probability, "no request has room", fixed, branch)
        least = self._least(found, num_requests, total, drafting)
        risk = _careful(found, least) + drafting
        state = f"balance {self.balance:.2f} plain steps"
        hope = min(1.0, max(0.0, 1.0 + self._hoped / _DOUBT))
        stake = self.balance * hope
        can_shadow = self._shadow >= self._shadow_cost(num_requests)
        if can_shadow and (self._gains.num_steps < _FIRST_SHADOWS or risk > stake):
            why = "a fresh engine" if self._gains.num_steps < _FIRST_SHADOWS else "drafts lost time"
            # Nothing is at stake: only what is drafted tells the proposer how sure it may be.
            return Allowance(None, break_even, f"{why}; {state}", fixed, branch, is_shadow=True)
        if risk > stake:
            why = f"drafts lost time; {state}, {least} tokens too many"
            # What they earned comes back by itself, and is enough, if reading on costs less.
            comes_back = self._coming_back > self._usual_idle / found.plain_s
            comes_back &= risk <= min(_RETURNED, self._limit) * hope
            rests = self._resting is not None and not comes_back
            return Allowance(0, probability, why, may_rest=rests)
        # Drafts that earn little and vary much would lose it all in one step, and then stand still.
        part = min(_MOST_AT_ONCE, _AT_ONCE * math.sqrt(num_requests))
        at_once = stake * min(1.0, part + max(0.0, self._gains.lately))
        if _careful(found, total) + drafting <= at_once:
            return Allowance(None, probability, state, fixed, branch)
        affordable = max(least, self._affordable(found, total, at_once - drafting))
        return Allowance(affordable, probability, f"no more for a {state}", fixed, branch)

    def _count_tokens(self, num_requests: int, num_drafted: int, num_emitted: int) -> None:
        self._emitted = 0.97 * self._emitted + num_emitted
        self._requests = 0.97 * self._requests + num_requests
        self._verified = 0.97 * self._verified + num_drafted

    @property
    def _coming_back(self) -> float:
        """Plain steps a step: what a method that earns may lose again."""
        sure = _SURE_RETURN * self._gains.lasting if self._num_steps >= _FIRST_STEPS else 0.0
        return max(0.0, _RETURN * self._gains.lately, sure)

    @property
    def _hoped(self) -> float:
        """Plain steps a step that drafts may earn; a fresh engine hopes for nothing."""
        return self._gains.lately if self._num_steps < _FIRST_STEPS else self._gains.hoped

    def _shadow_cost(self, num_requests: int) -> float:
        found = self.costs.estimate(num_requests)
        if found is None:
            return 0.0
        return self._taken(self._shadowing or self._drafting, num_requests, found.plain_s)

    def _usual_drafting(self, num_requests: int, plain_s: float) -> float:
        """Drafting of all methods in plain steps; at first that of shadow drafts."""
        return self._taken(self._drafting or self._shadowing, num_requests, plain_s)

    @staticmethod
    def _taken(times: Mapping[tuple[str, int], float], num_requests: int, plain_s: float) -> float:
        """Seconds by method and size class; returns plain steps of all methods."""
        size_class = num_requests.bit_length()
        found: dict[str, tuple[int, float]] = {}  # by method, of the nearest size
        for (method, known), seconds in times.items():
            distance = abs(known - size_class)
            if method not in found or distance < found[method][0]:
                found[method] = distance, seconds
        if not found:
            return _FIRST_DRAFTING
        return sum(seconds for _, seconds in found.values()) / plain_s

    def _token_value(self, found: CostEstimate, num_requests: int, drafting: float) -> float:
        """Tokens that are emitted in the time of a plain step, as drafts are at present.

        A token accepted with probability p adds p to the yield, and its cost to the time.
        """
        num_drafted = round(self._verified / self._requests * num_requests)
        emitted = self._emitted / self._requests * num_requests
        return emitted / (1.0 + found.extra(num_drafted) + drafting)

    @staticmethod
    def _affordable(found: CostEstimate, most: int, balance: float) -> int:
        """Most draft tokens whose verification the balance covers."""
        low, high = 0, most  # low is affordable
        while low < high:
            middle = (low + high + 1) // 2
            if _careful(found, middle) <= balance:
                low = middle
            else:
                high = middle - 1
        return low

    @staticmethod
    def _least(found: CostEstimate, num_requests: int, total: int, drafting: float) -> int:
        """Fewest draft tokens that can earn twice what any draft costs.

        Fewer of them would say nothing: they lose time even if all are accepted.
        """
        per_token = found.per_token
        fixed = max(0.0, found.extra(1) - per_token) + drafting
        earned = 1.0 / num_requests - per_token
        least = int(2.0 * fixed / earned) + 1 if earned > 0.0 else num_requests
        reachable = DraftBudget._affordable(found, total, 0.5 * _LIMIT - drafting)
        return max(1, min(least, total, reachable))


def _careful(found: CostEstimate, num_drafted: int) -> float:
    """Cost of verification, rather too high than too low; in plain steps."""
    return found.extra(num_drafted) + _CAUTION * found.error(num_drafted)
