# SPDX-License-Identifier: Apache-2.0
"""An engine of known costs under a draft budget: no model, no clock, any number of seeds."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_spec_ext.engine.drafting.draft_budget import DraftBudget, shares
from vllm_spec_ext.engine.drafting.shadow_drafts import MOST_TOKENS

Acceptance = Callable[[int], float]  # step -> probability that a draft token is accepted


@dataclass(frozen=True)
class Machine:
    """True costs, in plain steps of one request."""

    token: float = 0.04
    """One more token in a step, a request's own or a draft's."""
    overhead: float = 0.0
    """Any drafts in a step."""
    drafting: float = 0.005
    """Drafting of a step."""
    idle: float = 0.005
    """The same of a step that drafts nothing, and part of any other's."""
    resting: float = 0.001
    """The same of a step whose tokens are read later."""
    noise: float = 0.15
    outliers: float = 0.005
    """Share of steps that take ten times as long."""
    drift: float = 0.3
    slowed: Mapping[int, float] = field(default_factory=dict)
    """Steps beside other programs: how many times as long they take."""

    def plain(self, num_requests: int) -> float:
        """A step without drafts."""
        return 1.0 + self.token * (num_requests - 1)


@dataclass
class Run:
    """What happened, step by step, without the noise: it hits plain decoding as well."""

    values: list[float] = field(default_factory=list)  # time plain decoding would have taken
    times: list[float] = field(default_factory=list)
    num_drafted: list[int] = field(default_factory=list)

    def ratio(self, start: int, stop: int) -> float:
        """Speed against plain decoding; 1 is as fast."""
        return sum(self.values[start:stop]) / sum(self.times[start:stop])

    def lowest(self, length: int, start: int = 0) -> float:
        """The worst window of that many steps."""
        value = sum(self.values[start : start + length])
        spent = sum(self.times[start : start + length])
        lowest = value / spent
        for i in range(start + length, len(self.times)):
            value += self.values[i] - self.values[i - length]
            spent += self.times[i] - self.times[i - length]
            lowest = min(lowest, value / spent)
        return lowest


def simulate(
    machine: Machine,
    acceptance: Acceptance,
    *,
    num_steps: int = 1500,
    seed: int = 0,
    most: int = 8,
    batch: Callable[[int], int] = lambda step: 1,
    budget: DraftBudget | None = None,
    prefill: Callable[[int], bool] = lambda step: False,
    obeys: bool = False,
) -> Run:
    """Decode under a budget; without one every step drafts all it can.

    Args:
        machine: What steps cost.
        acceptance: Of one token, given that those before it were accepted.
        num_steps: How long.
        seed: Of noise and acceptance.
        most: Draft tokens of a request.
        batch: Requests in each step.
        budget: What is tested; None = no limit.
        prefill: Steps that have prefill tokens, too.
        obeys: The proposer leaves out tokens that are less likely than the budget asks for.
    """
    rng = random.Random(seed)
    phase = rng.uniform(0, 2 * math.pi)
    run = Run()
    drafts: Sequence[int] = ()
    num_before = 0
    for step in range(num_steps):
        num_requests = batch(step)
        drafts = [*drafts, *[0] * num_requests][:num_requests]
        probability = acceptance(step)
        emitted = sum(1 + _accepted(rng, probability, length) for length in drafts)
        num_drafted = sum(drafts)
        plain = machine.plain(num_requests)
        seconds = plain + machine.token * num_drafted + machine.overhead * (num_drafted > 0)
        speed = 1 + machine.drift * math.sin(phase + 2 * math.pi * step / 2000)
        measured = 0.03 * speed * seconds * (1 + machine.noise * rng.uniform(-1, 1))
        measured *= 10 if rng.random() < machine.outliers else machine.slowed.get(step, 1.0)
        rooms = [most] * num_requests
        if budget is not None and num_requests == num_before and budget.may_rest():
            resting = machine.resting * plain
            taken = 0.03 * speed * resting * (1 + machine.noise * rng.uniform(-1, 1))
            budget.rested(num_requests, measured, taken)
            run.values.append(plain * speed)
            run.times.append((plain + resting) * speed)
            run.num_drafted.append(0)
            continue
        num_before = num_requests
        if budget is not None:
            budget.verified(num_requests, num_drafted, emitted, None if prefill(step) else measured)
            allowance = budget.allow(rooms)
            allowed = allowance.max_tokens
            if obeys:
                likely = _likely(probability, most, allowance.min_probability)
                rooms = [likely] * num_requests
            drafts = rooms if allowed is None else shares(allowed, rooms, step % num_requests)
        else:
            drafts = rooms
        drafting = (machine.idle + machine.drafting * any(drafts)) * plain
        if budget is not None:
            pause = 10 if rng.random() < machine.outliers else 1
            taken = 0.03 * speed * drafting * (1 + machine.noise * rng.uniform(-1, 1)) * pause
            budget.drafted({"method": taken})
            if allowance.is_shadow:
                shadows = [min(MOST_TOKENS, room) for room in rooms]
                said = sum(_accepted(rng, probability, length) for length in shadows)
                budget.shadowed(num_requests, sum(shadows), said)
                drafts = ()
        run.values.append(emitted / num_requests * plain * speed)
        run.times.append((seconds + drafting) * speed)
        run.num_drafted.append(num_drafted)
    return run


def _likely(probability: float, most: int, least: float | None) -> int:
    """Tokens of a draft each of which is accepted with at least this probability."""
    paths = (probability**length for length in range(1, most + 1))
    return sum(least is None or path >= least for path in paths)


def _accepted(rng: random.Random, probability: float, length: int) -> int:
    count = 0
    while count < length and rng.random() < probability:
        count += 1
    return count
