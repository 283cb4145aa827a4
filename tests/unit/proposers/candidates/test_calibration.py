# SPDX-License-Identifier: Apache-2.0
"""What sources are worth is learned from outcomes."""

import numpy as np
import pytest

from vllm_spec_ext.proposers.candidates import evidence
from vllm_spec_ext.proposers.candidates.calibration import Calibration
from vllm_spec_ext.proposers.candidates.evidence import (
    COPY,
    NUM_COLUMNS,
    OTHERS,
    OWN,
    RECYCLED,
    TOGETHER,
)
from vllm_spec_ext.proposers.candidates.kernels import given_class

HALF = np.full(3, 0.5, np.float32)


def chance(calibration: Calibration, classes: dict[int, int]) -> float:
    row = [classes.get(source, 0) for source in range(NUM_COLUMNS)]
    odds = sum(calibration.weights[source, place] for source, place in enumerate(row))
    return float(1 / (1 + np.exp(-odds)))


def test_agreement_is_worth_what_it_turns_out_to_be() -> None:
    random = np.random.default_rng(0)
    calibration = Calibration()
    kinds: tuple[dict[int, int], ...] = (
        {OWN: 5, RECYCLED: OTHERS},
        {OWN: OTHERS, RECYCLED: 7},
        {OWN: 5, RECYCLED: 7},
    )
    assert not calibration.weights[:, 0].any()
    rates = (0.3, 0.2, 0.6)
    for _ in range(3000):
        kind = int(random.integers(3))
        row = np.zeros((1, NUM_COLUMNS), np.int16)
        for source, place in kinds[kind].items():
            row[0, source] = place
        calibration.drafted("r", np.array([-1], np.int32), row, HALF[:1])
        calibration.verified("r", 1, [0] if random.random() < rates[kind] else [])
    for one, rate in zip(kinds, rates, strict=True):
        assert chance(calibration, one) == pytest.approx(rate, abs=0.1)
    assert not calibration.weights[:, 0].any()


def test_nodes_below_a_rejected_one_teach_nothing() -> None:
    calibration = Calibration()
    before = calibration.weights.copy()
    classes = np.zeros((3, NUM_COLUMNS), np.int16)
    classes[:, OWN] = [3, 4, 5]
    calibration.drafted("r", np.array([-1, 0, 1], np.int32), classes, HALF[:3])
    calibration.verified("r", 3, [0])  # the second is wrong; the third was never asked
    assert calibration.weights[OWN, 3] > before[OWN, 3]
    assert calibration.weights[OWN, 4] < before[OWN, 4]
    assert calibration.weights[OWN, 5] == before[OWN, 5]


def test_what_the_scheduler_cut_off_teaches_nothing_and_a_request_that_is_gone_neither() -> None:
    calibration = Calibration()
    before = calibration.weights.copy()
    classes = np.full((2, NUM_COLUMNS), 1, np.int16)
    classes[1] = 2
    calibration.drafted("r", np.array([-1, -1], np.int32), classes, HALF[:2])
    calibration.verified("r", 1, [0])
    assert (calibration.weights[:, 2] == before[:, 2]).all()
    calibration.drafted("gone", np.array([-1, -1], np.int32), classes, HALF[:2])
    calibration.forget("gone")
    now = calibration.weights.copy()
    calibration.verified("gone", 2, [1])
    assert (calibration.weights == now).all()


def test_every_class_has_a_place() -> None:
    highest = evidence.matched_class(len(evidence.LENGTHS), evidence.NUM_SHARES - 1)
    assert highest < evidence.OTHERS
    assert given_class(1.0, 1) < evidence.OTHERS
    assert evidence.OTHERS + len(evidence.LENGTHS) < evidence.NUM_CLASSES


def test_classes_that_were_seldom_tried_are_searched_with_hope() -> None:
    """What may be better than it looks is drafted until it has been tried often enough."""
    calibration = Calibration()
    row = np.zeros((1, NUM_COLUMNS), np.int16)
    row[0, OWN] = 3

    def hope(place: int) -> float:
        return float(calibration.hopeful[OWN, place] - calibration.weights[OWN, place])

    first = hope(3)
    assert first == pytest.approx(hope(4))
    assert first > 0.2
    for number in range(200):
        calibration.drafted("r", np.array([-1], np.int32), row, HALF[:1])
        calibration.verified("r", 1, [0] if number % 2 else [])
    assert 0.0 < hope(3) < first / 3
    assert hope(4) == pytest.approx(first)
    assert not calibration.hopeful[:, 0].any()  # a source that says nothing adds nothing


def test_sources_that_only_repeat_each_other_are_told_from_those_that_confirm() -> None:
    """The same two classes, added up: neither sum of log-odds fits all three rates."""
    random = np.random.default_rng(0)
    calibration = Calibration()
    kinds: tuple[dict[int, int], ...] = (
        {OWN: 5, TOGETHER: 1 + 2**OWN},
        {COPY: 5, TOGETHER: 1 + 2**COPY},
        {OWN: 5, COPY: 5, TOGETHER: 1 + 2**OWN + 2**COPY},
    )
    for _ in range(6000):
        row = np.zeros((1, NUM_COLUMNS), np.int16)
        for column, place in kinds[int(random.integers(3))].items():
            row[0, column] = place
        calibration.drafted("r", np.array([-1], np.int32), row, HALF[:1])
        calibration.verified("r", 1, [0] if random.random() < 0.7 else [])
    for one in kinds:
        assert chance(calibration, one) == pytest.approx(0.7, abs=0.08)
