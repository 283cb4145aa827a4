# SPDX-License-Identifier: Apache-2.0
"""``scripts/own_floor.py``: an engine's slowest stretch beside its own plain steps."""

import math
from typing import Any

import numpy as np
import pytest

import own_floor


def steps(plain_s: Any, drafting_s: float, nodes: int, tokens: int) -> Any:
    """Of four requests: each fifth is plain, a node of the others takes a tenth of that."""
    return [
        own_floor.Step(4, 4, 0, taken + drafting_s, drafting_s)
        if at % 5 == 0
        else own_floor.Step(tokens, 4, nodes, taken * (1 + 0.1 * nodes) + drafting_s, drafting_s)
        for at, taken in enumerate(plain_s)
    ]


def test_a_step_is_compared_with_plain_ones_next_to_it() -> None:
    """The machine is half as fast from the middle on, and nothing is lost by that."""
    plain_s = np.repeat([0.05, 0.1], 300)
    found = own_floor.row("chat", steps(plain_s, 0.0, nodes=5, tokens=6))
    assert (found["steps"], found["drafted"]) == (600, 480)
    assert found["noise"] == pytest.approx(1.0, abs=0.01)
    assert found["speed"] == pytest.approx(1.0, abs=0.01)  # 6 of 4 tokens, in half as long again
    assert found["slowest"] == pytest.approx(1.0, abs=0.02)


def test_drafting_time_and_drafts_that_fail_are_lost() -> None:
    plain_s = np.full(400, 0.1)
    idle = own_floor.row("chat", steps(plain_s, 0.002, nodes=0, tokens=4))
    assert (idle["drafted"], idle["plain_ms"]) == (0, 100.0)
    assert idle["slowest"] == round(1 / 1.02, 3)
    given = steps(plain_s, 0.0, nodes=2, tokens=8)
    given[250:350] = steps(plain_s[:100], 0.0, nodes=2, tokens=4)
    found = own_floor.row("chat", given)
    assert found["slowest"] < found["speed"]
    # 200 steps with all that fail: 100 of 0.116 on the mean, 20 plain ones, 80 of two tokens each.
    assert found["slowest"] == round((100 + 20 + 160) / (100 * 1.16 + 20 + 80 * 1.2), 3)


def test_a_kind_without_plain_steps_says_nothing() -> None:
    found = own_floor.row("chat", [own_floor.Step(6, 4, 2, 0.1, 0.0)] * 3)
    assert math.isnan(found["speed"])
    assert math.isnan(found["slowest"])
    assert own_floor.row("chat", [])["speed"] is None
