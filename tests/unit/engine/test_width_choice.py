# SPDX-License-Identifier: Apache-2.0
"""Asynchronous engines draft where steps with drafts give more than they take."""

import random
from collections.abc import Callable

import pytest

from vllm_spec_ext.engine.v2.late_tables.width_choice import WidthChoice

PLAIN_S = 0.004


class Engine:
    """Steps that are scheduled while the one before runs: what is chosen shows two steps later."""

    def __init__(self, cost: float, tokens: Callable[[int], float], seed: int = 1) -> None:
        """`cost` of a step with drafts, in plain ones; `tokens` of it, by the step's number."""
        self.cost, self.tokens = cost, tokens
        self.random = random.Random(seed)
        self.now = 0.0
        self.choice = WidthChoice(lambda: self.now)
        self.queued: list[bool] = [False]
        self.seconds: list[float] = []
        self.said: list[float] = []
        self.drafted: list[bool] = []

    def run(self, num_steps: int, num_requests: int = 8) -> None:
        for _ in range(num_steps):
            drafts = self.queued.pop(0)
            number = len(self.seconds)
            wanted = self.choice.drafts_next(num_requests, 8 * drafts, only_decodes=True)
            self.queued.append(wanted)
            noise = 1 + 0.1 * self.random.random() + (self.random.random() < 0.02)
            taken = PLAIN_S * noise * (self.cost if drafts else 1)
            self.now += taken
            gained = self.tokens(number) if drafts else 1.0
            if drafts:
                got = sum(
                    1 + (self.random.random() < gained - int(gained)) + int(gained) - 1
                    for _ in range(num_requests)
                )
                self.choice.answered(num_requests, num_requests, got)
            self.seconds.append(taken)
            self.said.append(gained)
            self.drafted.append(drafts)

    def speed(self, start: int, end: int) -> float:
        """Of plain decoding's, at the mean noise."""
        mean = PLAIN_S * 1.07
        return sum(self.said[start:end]) * mean / sum(self.seconds[start:end])


@pytest.mark.parametrize(("cost", "tokens"), [(1.2, 1.75), (1.7, 1.9), (1.0, 1.1), (1.0, 1.3)])
def test_what_pays_is_drafted(cost: float, tokens: float) -> None:
    engine = Engine(cost, lambda number: tokens)
    engine.run(3000)
    assert sum(engine.drafted) > 0.95 * 3000
    assert engine.speed(0, 3000) > 0.96 * tokens / cost


@pytest.mark.parametrize(("cost", "tokens"), [(1.2, 1.0), (1.7, 1.2), (3.5, 1.9)])
def test_what_does_not_pay_rests(cost: float, tokens: float) -> None:
    engine = Engine(cost, lambda number: tokens)
    engine.run(4000)
    assert sum(engine.drafted[1000:]) < 0.06 * 3000
    assert engine.speed(1000, 4000) > 0.95
    assert any(engine.drafted[1000:]), "they are tried again"


def test_where_it_makes_no_difference_nothing_is_lost() -> None:
    engine = Engine(1.01, lambda number: 1.0)
    engine.run(3000)
    assert engine.speed(0, 3000) > 0.98


def test_drafts_come_back_and_go_again() -> None:
    """Text of which something is copied from step 1500 to 3000."""
    engine = Engine(1.5, lambda number: 2.5 if 1500 <= number < 3000 else 1.0)
    engine.run(5000)
    copied = engine.drafted[2100:3000]
    assert sum(copied) > 0.9 * len(copied)
    assert sum(engine.drafted[3200:5000]) < 0.1 * 1800
    assert sum(engine.drafted[500:1500]) < 0.1 * 1000


def test_batches_of_other_sizes_are_judged_apart() -> None:
    engine = Engine(1.0, lambda number: 1.6)
    engine.run(600, num_requests=2)
    engine.cost = 3.0
    engine.run(600, num_requests=30)
    assert not engine.drafted[-1]
    engine.cost = 1.0
    engine.run(20, num_requests=3)
    assert engine.drafted[-1]


def test_prompts_say_nothing_of_steps() -> None:
    engine = Engine(1.0, lambda number: 1.0)
    choice = engine.choice
    for _ in range(200):
        engine.now += 1.0
        assert choice.drafts_next(8, 56, only_decodes=False)


@pytest.mark.parametrize("every", [4, 5, 9])
def test_prompts_between_steps_hide_no_loss(every: int) -> None:
    """What takes longer is known although few steps follow each other."""
    engine = Engine(1.5, lambda number: 1.0)
    for _ in range(4000 // every):
        engine.run(every - 1)
        engine.now += 0.02
        engine.choice.drafts_next(8, 0, only_decodes=False)
    assert sum(engine.drafted[1500:]) < 0.15 * len(engine.drafted[1500:])


def test_batches_on_the_border_of_two_groups() -> None:
    engine = Engine(1.5, lambda number: 1.0)
    for turn in range(1000):
        engine.run(4, num_requests=15 + turn % 2)
    assert sum(engine.drafted[1500:]) < 0.1 * 2500


def test_pauses_do_not_count_for_much() -> None:
    engine = Engine(1.2, lambda number: 1.8)
    for _ in range(100):
        engine.run(30)
        engine.now += 5.0  # nothing to do
    assert sum(engine.drafted) > 0.9 * 3000


def test_batches_that_never_draft_say_nothing_of_those_that_may() -> None:
    """Of 32 requests and 48 the first alone may; they are of one group, and take other times."""
    now, drafts, verified, choice = 0.0, [0, 0], 0, WidthChoice(lambda: now)
    for step in range(6000):
        large = step // 60 % 2 > 0
        drafts[0] += bool(verified)
        drafts[1] += not large
        now += PLAIN_S * (1.45 if verified else 1.2 if large else 1.0)
        if verified:
            choice.answered(32, 100, 130)
        if large:
            choice.interrupted()
            verified = 0
        else:
            verified = 8 * 32 * choice.drafts_next(32, verified, only_decodes=True)
    assert drafts[0] < 0.15 * drafts[1], "they lose a tenth"
