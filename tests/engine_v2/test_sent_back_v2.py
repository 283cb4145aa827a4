# SPDX-License-Identifier: Apache-2.0
"""Requests that are sent back in the middle of a draft, on the V2 runner.

The tests of V1, and the same where the scheduler runs ahead of what was sampled.
"""

from typing import Any

import pytest
from generation import count_preempted
from test_greedy_identity import METHODS
from test_sent_back import (
    answers,
    generate,
    test_by_an_empty_cache,
    test_by_requests_that_go_first,
)

__all__ = ["answers", "test_by_an_empty_cache", "test_by_requests_that_go_first"]

AHEAD = {
    "oracle": METHODS["oracle"],
    "oracle_tree": METHODS["oracle_tree"],
    "late": {"method": "input_copy", "num_speculative_tokens": 8},
}


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_while_the_scheduler_runs_ahead(
    name: str,
    policy: str,
    answers: list[list[int]],
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = {"num_gpu_blocks_override": 16, "scheduling_policy": policy}
    engine = make_engine(
        speculative_config=AHEAD[name],
        async_scheduling=True,
        **(few if policy == "priority" else {}),
    )
    preempted = count_preempted(engine, monkeypatch)
    told_by = "source_token_ids" if name == "late" else "truth"
    if policy == "priority":
        when: dict[str, Any] = {"priorities": (2, 1, 0), "starts": (0, 1, 4)}
    else:
        when = {"resets": (2, 3, 5)}
    assert generate(engine, answers, told_by=told_by, **when) == answers
    assert preempted
