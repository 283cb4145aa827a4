# SPDX-License-Identifier: Apache-2.0
"""Draft models on the V2 runner: a target that is its own draft model accepts everything.

The tests of V1, a few of each kind.
"""

from typing import Any

import pytest
import test_models_oracle as oracle
from generation import run, tokens
from scenarios import SCENARIOS
from test_greedy_identity import runner_of
from test_models_oracle import drafts, with_models

__all__ = ["drafts", "with_models"]


def test_the_target_accepts_all_of_itself(
    with_models: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mixed batches, beside chunked prefill, after prefix hits, with `n` > 1."""
    monkeypatch.setattr(oracle, "FREE", ("mixed_lengths", "prefix_reused", "several_samples"))
    oracle.test_the_target_accepts_all_of_itself("fork", with_models, expected)
    runner = runner_of(with_models("self", **oracle.SHAPES["fork"]))
    assert "vllm.v1.worker.gpu.model_runner" in [kind.__module__ for kind in type(runner).__mro__]


def test_second_turns(with_models: Any, plain: Any) -> None:
    oracle.test_second_turns("fork", with_models, plain)


def test_preemption(with_models: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle.test_preemption("chain", with_models, plain, monkeypatch)


def test_aborted_requests_leave_nothing_behind(with_models: Any, expected: Any) -> None:
    oracle.test_aborted_requests_leave_nothing_behind(with_models, expected)


def test_a_session_that_goes_on(with_models: Any) -> None:
    oracle.test_a_session_that_goes_on(with_models)


def test_several_models(with_models: Any, expected: Any) -> None:
    oracle.test_several_models("few_heads kv_heads self", with_models, expected)


def test_same_tokens_where_others_choose_too(with_models: Any, expected: Any) -> None:
    oracle.test_same_tokens_where_others_choose_too("json_schema", "fork", with_models, expected)


def test_while_the_scheduler_runs_ahead(with_models: Any, expected: Any) -> None:
    engine = with_models("self", {"async_scheduling": True}, **oracle.SHAPES["fork"])
    assert runner_of(engine).is_async
    for scenario in ("mixed_lengths", "prefix_reused"):
        drafter = oracle.drafter_of(engine)
        assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario]
        assert drafter.num_missed == 0
        assert drafter.num_right > 60
