# SPDX-License-Identifier: Apache-2.0
"""Plain decoding is the floor: drafting may lose little time, and never much at once."""

import itertools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from simulated_engine import Acceptance, Machine, Run, simulate

from vllm_spec_ext.engine.drafting.draft_budget import Allowance, DraftBudget, shares
from vllm_spec_ext.engine.drafting.loss_window import NUM_STEPS, LossWindow

SEEDS = range(2)  # a sweep of many is the same test with more

MACHINES = {
    "processor": Machine(),
    "heavy rows": Machine(token=0.1),
    "free rows": Machine(token=0.0005, drafting=0.01),
    "slow drafter": Machine(drafting=0.2),
    "overhead": Machine(overhead=0.1),
    "first step paused": Machine(slowed={0: 10.0}),
    "first drafts paused": Machine(slowed={3: 10.0}),
    "many pauses": Machine(outliers=0.02),
    "dear reading": Machine(idle=0.018, drafting=0.03),
}
ACCEPTANCE: dict[str, Acceptance] = {
    "always wrong": lambda step: 0.0,
    "bad": lambda step: 0.2,
    "so so": lambda step: 0.5,
    "good": lambda step: 0.9,
    "phases": lambda step: 0.9 if step // 400 % 2 == 0 else 0.0,
}
BATCHES: dict[str, Callable[[int], int]] = {
    "one": lambda step: 1,
    "eight": lambda step: 8,
    "changing": lambda step: (1, 2, 4, 8, 7, 6, 5, 3)[step // 60 % 8],
    "filling and draining": lambda step: (1, 16)[step // 4 % 2],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
@pytest.mark.parametrize("machine", MACHINES)
def test_never_much_slower_than_plain_decoding(machine: str, acceptance: str, batch: str) -> None:
    for seed, can_rest in itertools.product(SEEDS, (True, False)):
        if machine == "dear reading" and not can_rest:
            continue  # reading alone takes what may be lost
        run = simulate(
            MACHINES[machine],
            ACCEPTANCE[acceptance],
            seed=seed,
            batch=BATCHES[batch],
            budget=DraftBudget(can_rest),
            num_steps=1000,
        )
        assert run.lowest(200) >= 0.98
        assert run.ratio(0, 50) >= 0.98


@pytest.mark.parametrize("acceptance", ["always wrong", "bad"])
def test_where_drafts_lose_time_most_steps_are_not_even_read(acceptance: str) -> None:
    machine = MACHINES["dear reading"]
    for batch in (1, 8):
        run = simulate(
            *(machine, ACCEPTANCE[acceptance]),
            batch=lambda step, batch=batch: batch,  # type: ignore[misc]
            budget=DraftBudget(can_rest=True),
        )
        assert run.ratio(500, 1500) >= 1 - machine.idle / 2


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("machine", ["processor", "free rows", "slow drafter", "overhead"])
def test_a_good_drafter_keeps_its_gain(machine: str, batch: str) -> None:
    gains, unlimited = 0.0, 0.0
    for seed in SEEDS:
        for budget in (DraftBudget(), None):
            run = simulate(
                MACHINES[machine],
                ACCEPTANCE["good"],
                seed=seed,
                batch=BATCHES[batch],
                budget=budget,
                num_steps=500,
            )
            if budget is None:
                unlimited += run.ratio(0, 500) - 1
            else:
                gains += run.ratio(0, 500) - 1
    # Where drafting is dear, a fresh engine finds out more slowly.
    assert gains >= (0.85 if machine == "slow drafter" else 0.93) * unlimited


@pytest.mark.parametrize(
    ("machine", "most", "acceptance", "share"),
    [
        # A block drafter, which also reads every step, and heads, on chat: half of the drafts are
        # wrong from their first token on, and lose a quarter of a step; the mean earns four tenths.
        (Machine(token=0.02, drafting=0.14, idle=0.04), 5, 0.45, 0.55),
        (Machine(token=0.02, drafting=0.14, idle=0.04), 5, 0.6, 0.8),
        (Machine(token=0.03, drafting=0.09, idle=0.015), 4, 0.45, 0.7),
        (Machine(token=0.03, drafting=0.09, idle=0.015), 4, 0.6, 0.85),
    ],
)
def test_drafts_that_earn_on_average_outlast_bad_luck(
    machine: Machine, most: int, acceptance: float, share: float
) -> None:
    gains, unlimited = 0.0, 0.0
    for seed in range(8):
        for budget in (DraftBudget(), None):
            run = simulate(machine, lambda step: acceptance, seed=seed, most=most, budget=budget)
            if budget is None:
                unlimited += run.ratio(0, 1500) - 1
            else:
                gains += run.ratio(0, 1500) - 1
    assert gains >= share * unlimited


@pytest.mark.parametrize("machine", MACHINES)
def test_a_drafter_that_is_always_wrong_costs_less_than_one_percent(machine: str) -> None:
    for seed in SEEDS:
        run = simulate(
            *(MACHINES[machine], ACCEPTANCE["always wrong"]),
            seed=seed,
            budget=DraftBudget(can_rest=True),
        )
        assert run.ratio(100, 1500) >= 0.99


@pytest.mark.parametrize("machine", ["processor", "heavy rows", "slow drafter"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_drafter_that_becomes_good_is_found_again(machine: str, batch: int) -> None:
    delays = []
    for seed in range(12):
        run = simulate(
            MACHINES[machine],
            lambda step: 0.9 if step >= 600 else 0.0,
            seed=seed,
            batch=lambda step: batch,
            budget=DraftBudget(),
        )
        # Found: twenty steps that are faster than plain decoding.
        delays.append(next(n for n in range(900) if run.ratio(600 + n, 620 + n) > 1.1))
    assert sorted(delays)[6] <= 100
    assert sorted(delays)[10] <= 150


def beside_other_programs(seed: int, start: int = 600, stop: int = 800) -> dict[int, float]:
    """Steps of a busy time, in which some in a row take many times as long."""
    rng, step = random.Random(seed), start
    steps: dict[int, float] = {}
    while step < stop:
        length, factor = rng.randint(1, 12), rng.choice((1, 1, 2, 4, 8, 16))
        steps |= {step + i: factor * rng.uniform(0.8, 1.5) for i in range(length)}
        step += length
    return steps


# In these what drafts cost was estimated so wrongly, or so unsurely, that none were made, or few.
@pytest.mark.parametrize(
    ("token", "batch", "seed", "gain"),
    [*((0.1, 1, seed, 1.3) for seed in (33, 115, 139)), (0.01, 8, 7, 2), (0.01, 8, 11, 2)],
)
def test_drafts_come_back_when_other_programs_are_gone(
    token: float, batch: int, seed: int, gain: float
) -> None:
    run = simulate(
        Machine(token=token, slowed=beside_other_programs(seed)),
        lambda step: 0.45 if step < 1200 else 0.85,
        num_steps=1800,
        seed=seed,
        batch=lambda step: batch,
        budget=DraftBudget(can_rest=True),
        obeys=True,
    )
    assert run.ratio(1300, 1800) > gain


@pytest.mark.parametrize(
    ("token", "acceptance", "batch", "gain"),
    [(0.01, 0.45, 16, 1.1), (0.005, 0.45, 16, 1.15), (0.002, 0.45, 32, 1.15)],
)
def test_a_first_guess_that_no_draft_can_meet_is_doubted(
    token: float, acceptance: float, batch: int, gain: float
) -> None:
    """A proposer drafts nothing that the guess says cannot pay, and so nothing would be measured.

    Steps have as many requests from the first one on, so that no others tell what a token costs.
    """
    runs = [
        simulate(
            Machine(token=token, drafting=0.02, idle=0.01),
            lambda step: acceptance,
            seed=seed,
            batch=lambda step: batch,
            budget=DraftBudget(),
            num_steps=1500,
            obeys=True,
        )
        for seed in range(6)
    ]
    assert sorted(run.ratio(500, 1500) for run in runs)[1] >= gain
    assert min(run.lowest(200) for run in runs) >= 0.98


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("acceptance", ["always wrong", "bad", "so so"])
def test_a_guess_that_is_doubted_costs_little(machine: str, acceptance: str) -> None:
    for batch, seed in itertools.product((8, 16), SEEDS):
        run = simulate(
            MACHINES[machine],
            ACCEPTANCE[acceptance],
            seed=seed,
            batch=lambda step, batch=batch: batch,  # type: ignore[misc]
            budget=DraftBudget(),
            num_steps=1500,
            obeys=True,
        )
        assert run.lowest(200) >= 0.98


def flips(run: Run, start: int) -> float:
    """Share of the steps from there on before which drafts begin or end."""
    drafts = [num_drafted > 0 for num_drafted in run.num_drafted[start:]]
    return sum(map(operator.ne, drafts, drafts[1:])) / (len(drafts) - 1)


class LastDraftsDecide(DraftBudget):
    """What oscillates: it drafts all it can, and after drafts that lost time one step nothing."""

    _paid = True

    def verified(
        self, num_requests: int, num_drafted: int, num_emitted: int, *more: float | None
    ) -> None:
        super().verified(num_requests, num_drafted, num_emitted, *more)  # type: ignore[arg-type]
        self._paid = not num_drafted or num_emitted > 1.5 * num_requests

    def allow(self, rooms: Sequence[int], is_following: bool = False) -> Allowance:
        found = super().allow(rooms, is_following)
        return replace(found, max_tokens=None if self._paid else 0, is_shadow=False)


# Machine, acceptance, requests: of the fewest of these drafts pay for sure, of the most they lose.
NEAR_BREAK_EVEN = {
    "processor, seldom right": (Machine(), 0.3, (4, 6, 7, 8, 10)),
    "processor, often right": (Machine(), 0.5, (12, 16, 18, 20, 24)),
    "overhead, seldom right": (Machine(token=0.02, overhead=0.1), 0.3, (4, 6, 8, 10, 12)),
    "overhead, often right": (Machine(token=0.02, overhead=0.1), 0.5, (16, 24, 32)),
}


@pytest.mark.parametrize("name", NEAR_BREAK_EVEN)
def test_near_the_break_even_drafts_do_not_come_and_go(name: str) -> None:
    """Of the bound, a plain step in eleven to compare with, asked for where little is earned,
    takes nearly all."""
    machine, acceptance, sizes = NEAR_BREAK_EVEN[name]
    batches: list[Callable[[int], int]] = [
        *(lambda step, size=size: size for size in sizes),
        lambda step: sizes[0] + step // 8 % (sizes[-1] - sizes[0] + 1),
    ]
    for batch, seed in itertools.product(batches, SEEDS):
        run = simulate(
            *(machine, lambda step: acceptance),
            seed=seed,
            batch=batch,
            budget=DraftBudget(),
            num_steps=2000,
            obeys=True,
        )
        assert flips(run, 300) <= 0.2
        assert run.lowest(200) >= 0.98


def test_what_oscillates_would_be_seen() -> None:
    run = simulate(
        *(Machine(), lambda step: 0.3), batch=BATCHES["eight"], budget=LastDraftsDecide()
    )
    assert flips(run, 300) > 0.4
    assert run.lowest(200) < 0.9


@pytest.mark.parametrize("obeys", [True, False])
@pytest.mark.parametrize("size", [1, 4, 8, 16, 32])
def test_drafts_end_with_text_that_is_predictable_and_come_back_with_it(
    size: int, obeys: bool
) -> None:
    for seed in range(3):
        run = simulate(
            *(Machine(), lambda step: 0.85 if step // 500 % 2 == 0 else 0.03),
            seed=seed,
            batch=lambda step: size,
            budget=DraftBudget(),
            num_steps=2500,
            obeys=obeys,
        )
        drafts = [num_drafted > 0 for num_drafted in run.num_drafted]
        for change in (500, 1500):  # to text that nothing predicts
            assert any(drafts[change - 20 : change])
            ended = next(n for n in range(500) if not any(drafts[change + n : change + n + 20]))
            assert ended <= 100
            assert sum(drafts[change + 100 : change + 500]) <= 8  # of 400
        for change in (1000, 2000):  # and back
            back = next(n for n in range(480) if sum(drafts[change + n : change + n + 20]) >= 15)
            assert back <= 100
            assert run.ratio(change + 100, change + 500) > 1.1
        assert run.lowest(200) >= 0.98


@pytest.mark.parametrize("name", ["processor, often right", "overhead, often right"])
def test_drafts_that_pay_a_little_are_found_whatever_the_first_ones_took(name: str) -> None:
    """A few steps that are slow by chance say that no draft can pay; then none is made."""
    machine, acceptance, sizes = NEAR_BREAK_EVEN[name]
    for seed in range(8):
        run = simulate(
            *(machine, lambda step: acceptance),
            seed=seed,
            batch=lambda step: sizes[0],
            budget=DraftBudget(),
            num_steps=2500,
            obeys=True,
        )
        assert run.ratio(1500, 2500) >= 1.08
        assert run.lowest(200) >= 0.98


def test_without_a_budget_drafting_may_lose_half_the_speed() -> None:
    # What the tests above would find if the budget did nothing.
    run = simulate(MACHINES["heavy rows"], ACCEPTANCE["always wrong"])
    assert run.lowest(200) < 0.6


def past_first_drafts(num_steps: int = 20) -> DraftBudget:
    """A budget that has seen shadow drafts do well, at steps of 0.03 s; after 8 steps only them."""
    budget = DraftBudget()
    for _ in range(num_steps):
        budget.verified(1, 0, 1, 0.03)
        if budget.allow([8]).is_shadow:
            budget.shadowed(1, 8, 4)
            budget.drafted({"method": 0.0006})
        else:
            budget.drafted({"method": 0.0})
    return budget


def test_a_step_with_prefill_counts_its_drafting_and_modelled_verification() -> None:
    budget = past_first_drafts()
    before = budget.balance
    budget.verified(1, 0, 1, None)
    assert budget.balance == pytest.approx(before, abs=0.01)
    assert budget.allow([8]).max_tokens != 0
    budget.drafted({"method": 0.0015})
    assert before - 0.06 < budget.balance < before
    budget.verified(1, 4, 1, None)
    assert budget.balance < before - 0.2


def test_what_shadow_drafts_leave_out_counts_in_full_once_drafts_are_verified() -> None:
    budget = past_first_drafts(8)
    before = budget.balance
    found = budget.allow([8])
    assert found.max_tokens != 0
    assert not found.is_shadow
    budget.verified(1, 0, 1, None)
    budget.drafted({"method": 0.006})  # a fifth of a step, ten times as long as shadow drafts
    assert budget.balance == pytest.approx(before - 0.2, abs=0.02)


def test_steps_that_all_have_prefill_do_not_stop_drafting_for_good() -> None:
    run = simulate(
        Machine(),
        ACCEPTANCE["good"],
        budget=DraftBudget(),
        batch=lambda step: 2 if step < 20 else 8,
        prefill=lambda step: step >= 10,
    )
    assert run.ratio(200, 1500) > 1.5


def test_a_fresh_engine_starts_plain_then_only_compares_then_drafts_little() -> None:
    budget = DraftBudget()
    for _ in range(3):
        found = budget.allow([8])
        assert found.max_tokens == 0
        assert "measuring" in found.reason
        budget.verified(1, 0, 1, 0.03)
    for _ in range(6):
        found = budget.allow([64])
        assert found.is_shadow
        budget.drafted({"method": 0.0001})
        budget.shadowed(1, 8, 4)
        budget.verified(1, 0, 1, 0.03)
    found = budget.allow([64])
    assert not found.is_shadow
    assert found.max_tokens is not None
    assert 1 <= found.max_tokens <= 8
    assert "balance" in found.reason


def test_what_earns_with_many_requests_is_found_in_the_first_steps() -> None:
    """Drafts that are held short do not pay: the few tokens of eight requests cost any draft."""
    found = [
        simulate(
            Machine(token=0.1, drafting=0.07, idle=0.01),
            lambda step: 0.7,
            num_steps=300,
            seed=seed,
            most=1,
            batch=BATCHES["eight"],
            budget=DraftBudget(can_rest=True),
        ).ratio(0, 300)
        for seed in range(12)
    ]
    assert sum(found) / len(found) > 1.05
    assert min(found) > 0.98


@pytest.mark.parametrize(("drafting", "least"), [(0.3, 0.985), (0.7, 0.975)])
def test_a_dear_drafter_does_not_read_on_where_a_fresh_engine_may_not_ask_it(
    drafting: float, least: float
) -> None:
    """Its first drafts were good, but what may be lost pays for no others: reading cost 0.025."""
    for seed in range(6):
        run = simulate(
            Machine(token=0.04, drafting=drafting, idle=0.025),
            lambda step: 0.9 if step < 6 else 0.3,
            num_steps=600,
            seed=seed,
            most=4,
            batch=lambda step: 16,
            budget=DraftBudget(can_rest=True),
        )
        assert run.ratio(0, 50) >= least
        assert run.lowest(200) >= 0.978


def test_drafts_whose_shadows_fail_are_never_verified() -> None:
    run = simulate(Machine(drafting=0.0), ACCEPTANCE["always wrong"], budget=DraftBudget())
    assert not any(run.num_drafted)


def test_shadow_drafts_are_made_one_after_the_other() -> None:
    budget = DraftBudget()
    for _ in range(3):
        budget.verified(1, 0, 1, 0.03)
    assert budget.allow([8]).is_shadow
    waiting = budget.allow([8], is_following=True)
    assert not waiting.is_shadow
    assert waiting.max_tokens == 0


def test_a_step_without_new_tokens_drafts_nothing() -> None:
    budget = DraftBudget()
    for _ in range(10):
        budget.verified(1, 0, 1, 0.05)
        budget.allow([8])
        budget.drafted({"method": 0.001})
    budget.verified(0, 0, 0, None)  # the first pieces of a long prompt, and nothing beside them
    assert budget.allow([]).max_tokens == 0


def test_what_was_lost_long_ago_is_forgiven() -> None:
    window = LossWindow()
    window.add(-1.0)
    window.end_step(0.05)
    assert window.lost == 1.0
    window.add(0.4)
    window.end_step(0.05)
    assert window.lost == pytest.approx(0.6)
    window.add(5.0)  # what is gained covers no later loss
    window.end_step(0.05)
    assert window.lost == 0.0
    window.add(-1.0)
    for step in range(NUM_STEPS):
        assert window.lost == pytest.approx(1.0), step
        window.end_step(0.05)
    assert window.lost == 0.0


def test_the_window_knows_what_plain_decoding_takes_for_its_steps() -> None:
    window = LossWindow()
    assert window.mean_plain is None
    window.end_step(0.1)
    window.end_step(0.3)
    assert window.mean_plain == pytest.approx(0.2)
    for _ in range(NUM_STEPS - 1):
        window.end_step(0.5)
    assert window.mean_plain == pytest.approx((0.3 + (NUM_STEPS - 1) * 0.5) / NUM_STEPS)


def test_a_batch_that_drains_often_leaves_the_ledger_its_sight() -> None:
    """Sums that grew with every batch that drains would swallow what a step loses."""
    budget = DraftBudget()
    for step in range(5000):
        num_requests = (1, 16)[step // 8 % 2]
        budget.verified(num_requests, 0, num_requests, 0.1 if num_requests == 1 else 0.25)
        budget.allow([8] * num_requests)
        budget.drafted({"method": 0.0001})
    balances = []
    for _ in range(3):
        budget.verified(1, 8, 1, 0.15)  # rejected
        budget.allow([8])
        budget.drafted({"method": 0.0001})
        balances.append(budget.balance)
    assert balances[0] - balances[2] > 0.5


def test_drafting_time_alone_can_stop_a_method() -> None:
    budget = DraftBudget()
    allowed = []
    for _ in range(300):
        budget.verified(1, 0, 1, 0.03)
        max_tokens = budget.allow([8]).max_tokens
        allowed.append(max_tokens != 0)
        # It thinks for half a step and drafts nothing.
        budget.drafted({"method": 0.015 if allowed[-1] else 0.0})
    assert sum(allowed) < 15  # of 300
    assert any(allowed[50:])  # it is tried again


def test_methods_count_together() -> None:
    one, two = DraftBudget(), DraftBudget()
    for budget, seconds in ((one, {"a": 0.002}), (two, {"a": 0.001, "b": 0.001})):
        for _ in range(10):
            budget.verified(1, 0, 1, 0.03)
            budget.allow([8])
            budget.drafted(seconds)
    assert one.balance == pytest.approx(two.balance)


def budget_at(slope: float, requests: int) -> DraftBudget:
    """A budget that knows the cost of a token; each request emits two tokens a step."""
    budget, rng = DraftBudget(), random.Random(0)
    for step in range(300):
        drafted = 0 if step < 3 else requests * rng.randint(0, 16)
        budget.verified(requests, drafted, requests * 2, 30e-3 + slope * (requests + drafted))
    return budget


def test_break_even_probability() -> None:
    probability = budget_at(1.2e-3, 1).allow([8]).min_probability
    # Steps of 8 draft tokens on average take 40.8 ms and, without drafting time, yield 2 tokens.
    assert probability == pytest.approx(1.2 * 2 / 40.8, rel=0.15)
    assert budget_at(0.0, 1).allow([8]).min_probability == pytest.approx(0.0, abs=1e-3)


def test_larger_batches_make_tokens_dearer() -> None:
    small = budget_at(1.2e-3, 1).allow([8]).min_probability
    large = budget_at(1.2e-3, 8).allow([8] * 8).min_probability
    assert small is not None
    assert large is not None
    assert large > 2 * small


def test_a_cautious_break_even_is_stated_before_drafts_were_measured() -> None:
    budget = DraftBudget()
    assert budget.allow([8]).min_probability is None
    for _ in range(10):
        budget.verified(1, 0, 1, 0.03)
        probability = budget.allow([8]).min_probability
    assert probability == pytest.approx(0.05, rel=0.2)


def test_a_machine_that_changes_its_speed_changes_no_balance() -> None:
    budget = DraftBudget()
    for step in range(200):
        budget.verified(1, 0, 1, 0.03 if step < 100 else 0.12)
        if step == 99:
            before = budget.balance
    assert budget.balance >= before


def test_with_less_to_lose_drafts_must_be_surer() -> None:
    budget = past_first_drafts()
    bars = []
    for _ in range(60):
        allowance = budget.allow([8])
        assert allowance.min_probability is not None
        if allowance.max_tokens == 0 or allowance.is_shadow:
            break
        bars.append(allowance.min_probability)
        budget.drafted({"method": 0.0003})
        budget.verified(1, 1, 1, 0.03 * 1.04)
    assert len(bars) >= 4
    assert bars[-1] > 2 * bars[0]


def test_shadow_drafts_need_not_be_surer() -> None:
    """They put nothing at stake, and a proposer that is told of sure tokens alone learns little."""
    budget = past_first_drafts()
    shadow = None
    for _ in range(400):
        allowance = budget.allow([8])
        if allowance.is_shadow:
            shadow = allowance
            break
        drafts = allowance.max_tokens != 0
        budget.drafted({"method": 0.0003})
        budget.verified(1, 8 * drafts, 1, 0.03 * (1.0 + 0.3 * drafts))
    assert shadow is not None
    assert budget.balance < 0.2
    assert shadow.min_probability is not None
    assert shadow.min_probability < 0.1  # drafts that are verified must be surer than 0.3 now


def test_shares_are_equal_and_no_room_is_lost() -> None:
    assert shares(8, [8, 8]) == [4, 4]
    assert shares(5, [8, 8]) == [3, 2]
    assert shares(5, [8, 8], first=1) == [2, 3]
    assert shares(9, [2, 0, 8]) == [2, 0, 7]
    assert shares(99, [2, 0, 8]) == [2, 0, 8]
    assert shares(1, [0, 0, 8]) == [0, 0, 1]
    assert shares(3, []) == []


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("rests", [True, False])
def test_text_that_nothing_predicts_loses_at_most_two_percent(batch: int, rests: bool) -> None:
    # As `auto` on a small model on a processor: a node costs 8 % of a step, trees something of
    # their own, and sampling at a temperature of 1.5 leaves two tokens of a hundred foreseen.
    machine = Machine(token=0.08, overhead=0.03, drafting=0.02, idle=0.005)
    for seed in range(6):
        run = simulate(
            *(machine, lambda step: 0.02),
            seed=seed,
            batch=lambda step: batch,
            budget=DraftBudget(can_rest=rests),
            num_steps=1200,
        )
        assert run.lowest(200) >= 0.98
        assert run.ratio(0, 1200) >= 0.985


def test_a_first_draft_that_takes_long_is_soon_forgotten() -> None:
    budget, made = DraftBudget(), 0
    while made < 4:
        budget.verified(1, 0, 1, 0.03)
        allowance = budget.allow([4])
        if allowance.max_tokens == 0:
            budget.drafted({"method": 0.0})
            continue
        made += 1  # the first one finds its buffers and caches
        budget.drafted({"method": 0.03 if made == 1 else 0.003})
    assert budget._usual_drafting(1, 0.03) < 0.16  # plain steps; it is 0.1
