# SPDX-License-Identifier: Apache-2.0
"""What proposers make of the cost of a verified token; the cost itself: test_step_costs."""

import numpy as np
import pytest

from vllm_spec_ext.proposers.payoff.acceptance_rates import AcceptanceRates
from vllm_spec_ext.proposers.payoff.node_payoff import NodePayoff


def test_draft_length_follows_rates_and_cost() -> None:
    rates = AcceptanceRates([(0.5, 0.8)])
    assert rates.longest_draft(0, 0.0, 32) == 32
    assert rates.longest_draft(0, 0.1, 32) == 1 + 7  # 0.5 * 0.8**7 = 0.105
    assert rates.longest_draft(0, 0.1, 3) == 3
    assert rates.longest_draft(0, 0.6, 32) == 0
    for _ in range(300):
        rates.observe(0, 8, 0)
    assert rates.rates(0)[0] < 0.1
    assert rates.longest_draft(0, 0.1, 32) == 0


def test_a_hopeless_kind_is_tried_again_some_time() -> None:
    """Steps count, not requests."""

    def steps_until_then(num_requests: int) -> int:
        rates, steps = AcceptanceRates([(0.5, 0.8)]), 0
        for _ in range(300):
            rates.observe(0, 8, 0)
        while not max(rates.longest_draft(0, 0.1, 32) for _ in range(num_requests)):
            rates.next_step()
            steps += 1
        return steps

    assert 20 < steps_until_then(1) == steps_until_then(64) < 500


def test_full_and_partial_acceptance_are_counted_apart() -> None:
    rates = AcceptanceRates([(0.5, 0.5)], strength=1e-9)
    rates.observe(0, 4, 4)
    assert rates.rates(0) == pytest.approx((1.0, 1.0))
    rates = AcceptanceRates([(0.5, 0.5)], strength=1e-9)
    rates.observe(0, 4, 2)  # the third token was the one that fell
    assert rates.rates(0) == pytest.approx((1.0, 0.5))


def test_overconfident_estimates_need_more_confidence() -> None:
    payoff = NodePayoff()
    assert payoff.confidence(0.1) == pytest.approx(0.1)
    half = np.full(4, 0.5, np.float32)
    for i in range(200):
        payoff.drafted(str(i), half)
        payoff.verified(str(i), 4, [0])  # a quarter of the nodes
    assert payoff.trust == pytest.approx(0.5, rel=0.1)
    assert payoff.confidence(0.1) == pytest.approx(0.2, rel=0.1)  # never tried: as all others
    payoff.drafted("gone", half)
    payoff.forget("gone")
    assert not payoff._pending


def test_each_class_of_estimates_is_learned_by_itself() -> None:
    payoff = NodePayoff()
    probs = np.array([1.0, 0.6], np.float32)
    for i in range(300):  # both are promised too much: 6 and 1 of 10 stand
        payoff.drafted(str(i), probs)
        payoff.verified(str(i), 2, [0, 1] if not i % 10 else [0] if i % 2 else [])
    assert payoff.confidence(0.05) < 0.6
    assert 0.6 < payoff.confidence(0.3) <= 1.0
    assert payoff.confidence(0.7) > 1.0


def test_nodes_that_were_not_verified_are_no_failure() -> None:
    payoff, cut = NodePayoff(), NodePayoff()
    for i in range(50):
        payoff.drafted(str(i), np.ones(1, np.float32))
        payoff.verified(str(i), 1, [0])
        cut.drafted(str(i), np.array([1.0, 0.9, 0.9], np.float32))
        cut.verified(str(i), 1, [0])
    assert cut.trust == payoff.trust > 0.99


def test_where_nothing_pays_off_nothing_is_drafted_until_it_is_forgotten() -> None:
    payoff = NodePayoff()
    certain = np.ones(1, np.float32)
    for i in range(300):
        payoff.drafted(str(i), certain)
        payoff.verified(str(i), 1, [])
    assert payoff.confidence(0.5) > 1.0
    tried_again = [payoff.confidence(0.5) <= 1.0 for _ in range(400)]
    assert not tried_again[20]
    assert tried_again[-1]
