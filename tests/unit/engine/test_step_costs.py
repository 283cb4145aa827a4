# SPDX-License-Identifier: Apache-2.0
"""The running estimate of what steps cost, on made-up times."""

import math
import random

import pytest

from vllm_spec_ext.engine.drafting.step_costs import StepCosts


def measured(
    base: float, slope: float, requests: int = 1, noise: float = 0.0, seed: int = 0
) -> StepCosts:
    costs, rng = StepCosts(), random.Random(seed)
    for step in range(300):
        drafted = 0 if step < 3 else requests * rng.randint(0, 16)
        seconds = base + slope * (requests + drafted)
        costs.observe(requests, drafted, seconds * (1 + noise * rng.uniform(-1, 1)))
    return costs


def test_recovers_the_line() -> None:
    found = measured(30e-3, 1.2e-3, noise=0.05).estimate(1)
    assert found is not None
    assert found.plain_s == pytest.approx(31.2e-3, rel=0.05)
    assert 1 + found.extra(16) == pytest.approx(50.4 / 31.2, rel=0.05)
    assert found.error(16) < 0.05


def test_an_overhead_of_any_drafts_is_told_from_the_cost_of_each() -> None:
    costs = StepCosts()
    for step in range(300):
        drafted = (0, 1, 8)[step % 3]
        costs.observe(1, drafted, 0.03 + 0.003 * (drafted > 0) + 0.0003 * drafted)
    found = costs.estimate(1)
    assert found is not None
    assert found.extra(1) == pytest.approx(0.11, abs=0.01)
    assert found.per_token == pytest.approx(0.01, abs=0.003)


def test_nothing_is_known_before_three_plain_steps() -> None:
    costs = StepCosts()
    for _ in range(10):
        costs.observe(1, 4, 0.03)
        assert costs.estimate(1) is None
    for _ in range(3):
        assert costs.needs_plain(1)
        costs.observe(1, 0, 0.03)
    assert costs.estimate(1) is not None
    assert not costs.needs_plain(1)


@pytest.mark.parametrize("outlier", [0, 1, 2, 5])
def test_an_outlier_does_not_count_even_as_a_first_step(outlier: int) -> None:
    costs = StepCosts()
    for step in range(12):
        costs.observe(1, 4 * (step > 2), 0.3 if step == outlier else 0.03)
    found = costs.estimate(1)
    assert found is not None
    assert found.plain_s == pytest.approx(0.03, rel=0.05)
    assert found.extra(4) == pytest.approx(0.0, abs=0.1)


def test_two_pauses_at_the_start_are_forgotten_at_once() -> None:
    costs = StepCosts()
    for step in range(6):
        costs.observe(1, 0, 0.3 if step < 2 else 0.03)
    found = costs.estimate(1)
    assert found is not None
    assert found.plain_s == pytest.approx(0.03, rel=0.1)


def test_a_machine_that_stays_slower_is_believed() -> None:
    costs = measured(30e-3, 1e-3)
    for _ in range(6):
        costs.observe(1, 0, 0.12)
    found = costs.estimate(1)
    assert found is not None
    assert found.plain_s == pytest.approx(0.12, rel=0.05)


def test_steps_with_drafts_tell_how_fast_the_machine_is_now() -> None:
    costs = measured(30e-3, 1.2e-3, noise=0.05)
    for step in range(300):  # all of them with drafts, and slower and slower, by a third
        costs.observe(1, 8, (31.2e-3 + 8 * 1.2e-3) * (1 + step / 900))
    found = costs.estimate(1)
    assert found is not None
    assert found.plain_s == pytest.approx(31.2e-3 * 4 / 3, rel=0.06)
    assert found.extra(8) == pytest.approx(8 * 1.2 / 31.2, abs=0.06)


def test_free_tokens_cost_nothing() -> None:
    found = measured(10e-3, 0.0).estimate(1)
    assert found is not None
    assert found.per_token == pytest.approx(0.0, abs=1e-3)


def test_another_batch_size_is_guessed_then_measured() -> None:
    costs = measured(30e-3, 1.2e-3)
    guess = costs.estimate(8)
    assert guess is not None
    assert guess.plain_s == pytest.approx(39.6e-3, rel=0.05)
    assert costs.needs_plain(8)
    for _ in range(3):
        costs.observe(8, 0, 0.05)
    assert not costs.needs_plain(8)
    found = costs.estimate(8)
    assert found is not None
    assert found.plain_s == pytest.approx(0.05, rel=0.05)
    known = costs.estimate(1)  # what is known of one request stays
    assert known is not None
    assert known.plain_s == pytest.approx(31.2e-3, rel=0.02)


def test_batch_sizes_of_one_class_are_told_apart() -> None:
    costs = StepCosts()
    for step in range(100):
        requests = 8 + step % 8
        costs.observe(requests, 0, 0.03 + 0.002 * requests)
    for requests in (8, 15):
        found = costs.estimate(requests)
        assert found is not None
        assert found.plain_s == pytest.approx(0.03 + 0.002 * requests, rel=0.02)


def test_nonsense_is_left_out() -> None:
    costs = measured(30e-3, 1e-3)
    before = costs.estimate(1)
    costs.observe(0, 0, 1.0)
    costs.observe(1, 0, 0.0)
    after = costs.estimate(1)
    assert before is not None
    assert after is not None
    assert math.isclose(before.plain_s, after.plain_s)


@pytest.mark.parametrize("most", [100.0, 1000.0])
def test_however_a_machines_speed_changes_a_plain_step_takes_time(most: float) -> None:
    for seed in range(30):
        rng, costs, slower, until = random.Random(seed), StepCosts(), 1.0, 0
        for step in range(600):
            if step >= until:
                slower = math.exp(rng.uniform(0.0, math.log(most))) if rng.random() < 0.5 else 1.0
                until = step + rng.randint(3, 30)
            requests = rng.randint(1, 16)
            drafted = requests * rng.choice((0, 0, 4, 8))
            costs.observe(requests, drafted, slower * (0.03 + 0.0003 * (requests + drafted)))
            found = costs.estimate(requests)
            assert found is None or found.plain_s > 0.0, (seed, step)


def after_free_tokens() -> StepCosts:
    """One request, whose five draft tokens cost nothing, as rows that fill a core up do."""
    costs, rng = StepCosts(), random.Random(0)
    for step in range(1500):
        drafted = 0 if step < 3 or step % 20 == 0 else 5
        costs.observe(1, drafted, 0.04 * (1 + 0.1 * rng.uniform(-1, 1)))
    for _ in range(10):
        costs.observe(8, 0, 0.045)
    return costs


def test_tokens_that_are_free_for_one_request_may_be_dear_in_a_larger_batch() -> None:
    costs = after_free_tokens()
    guess = costs.estimate(8)
    assert guess is not None
    assert guess.extra(24) + 1.5 * guess.error(24) > 0.5  # nobody knows, so it may be much
    for _ in range(6):
        costs.observe(8, 8, 0.045 * 1.45)
    found = costs.estimate(8)
    assert found is not None
    assert found.extra(8) == pytest.approx(0.45, abs=0.1)
    assert found.extra(24) + 1.5 * found.error(24) > 1.0


def test_drafts_that_cost_far_more_than_expected_do_not_make_the_machine_slow() -> None:
    costs = after_free_tokens()
    for step in range(24):
        # As the draft budget does, which asks for a plain step where it does not know.
        drafted = 0 if costs.needs_plain(8) or step % 8 == 7 else 24
        costs.observe(8, drafted, 0.045 * (1 + 0.06 * drafted))
    found = costs.estimate(8)
    assert found is not None
    assert found.plain_s == pytest.approx(0.045, rel=0.1)
    assert found.extra(24) == pytest.approx(24 * 0.06, rel=0.2)


def test_what_drafts_cost_beside_another_program_is_not_believed_for_ever() -> None:
    costs, rng = StepCosts(), random.Random(0)
    for step in range(150):
        drafted = 0 if step < 3 or step % 4 == 0 else 4
        busy = rng.uniform(1, 5) if drafted and step > 50 else 1.0
        costs.observe(1, drafted, 0.04 * (1 + 0.03 * drafted) * busy)
    before = costs.estimate(1)
    assert before is not None
    assert before.extra(4) > 0.5
    for _ in range(900):  # nothing is verified as long as it seems to be so dear
        costs.observe(1, 0, 0.04)
    after = costs.estimate(1)
    assert after is not None
    assert after.extra(4) < 0.4 * before.extra(4)
    assert after.plain_s == pytest.approx(0.04, rel=0.02)
