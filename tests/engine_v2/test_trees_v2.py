# SPDX-License-Identifier: Apache-2.0
"""Draft trees on the V2 runner: with each part of their layout taken out, the output changes."""

from typing import Any

import pytest
from generation import run, tokens
from scenarios import PROMPTS, SCENARIOS, Scenario
from streaming_session import check_stop_tokens
from test_greedy_identity import METHODS, runner_of
from test_kv_truth import MUTATIONS
from vllm.v1.worker.gpu import model_runner

# Long enough for branches that cross the border of a block.
SCENARIO = Scenario([{"max_tokens": 30, "ignore_eos": True}], PROMPTS)


@pytest.fixture(scope="module")
def answers(plain: Any) -> Any:
    return tokens(run(plain, SCENARIO))


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_identity_breaks_without(
    mutate: Any, answers: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: otherwise the identity tests would prove nothing about this part."""
    engine = make_engine(speculative_config=METHODS["oracle_tree"])
    true = [completions[0] for completions in answers]
    engine.reset_prefix_cache()
    with monkeypatch.context() as patch:
        mutate(engine, patch)
        assert tokens(run(engine, SCENARIO, true)) != answers
    engine.reset_prefix_cache()
    assert tokens(run(engine, SCENARIO, true)) == answers


def test_trees_really_move_blocks(
    answers: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(speculative_config=METHODS["oracle_tree"])
    moved: list[tuple[int, int]] = []
    trees = runner_of(engine).tree_attention
    commit, copy = trees.commit, trees.copy_blocks

    def record_copies(pairs: list[tuple[int, int]]) -> None:
        moved.extend(pairs)
        copy(pairs)

    def record(walk: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(trees, "copy_blocks", record_copies)
            commit(walk)

    monkeypatch.setattr(trees, "commit", record)
    true = [completions[0] for completions in answers]
    assert tokens(run(engine, SCENARIO, true)) == answers
    assert len(moved) > 5


@pytest.fixture(scope="module")
def sessions_without_drafts() -> dict[Any, list[list[int]]]:
    return {}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("branches", [1, 4])
def test_what_is_accepted_behind_a_stop_token(
    branches: int,
    is_async: bool,
    make_engine: Any,
    sessions_without_drafts: dict[Any, list[list[int]]],
) -> None:
    oracle = {"method": "oracle", "num_speculative_tokens": 12, "wrong": 0.0, "branches": branches}
    more = {"async_scheduling": True} if is_async else {}
    check_stop_tokens(make_engine(speculative_config=oracle, **more), sessions_without_drafts)


def test_what_late_drafts_have_accepted_behind_a_stop_token(
    make_engine: Any, sessions_without_drafts: dict[Any, list[list[int]]]
) -> None:
    """The next step is in flight when the host sees the stop token."""
    copies = {"method": "input_copy", "num_speculative_tokens": 8}
    engine = make_engine(speculative_config=copies, async_scheduling=True)
    late = runner_of(engine).late_steps
    assert late is not None
    check_stop_tokens(engine, sessions_without_drafts, told_by="source_token_ids")


def test_rows_that_no_grammar_was_asked_for_are_not_accepted(
    plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when drafts of a request are scheduled before its grammar saw them."""
    scenario = SCENARIOS["json_schema"]
    truth = tokens(run(plain, scenario))
    on_host = {"scorer": {"type": "top_k", "k": 2}, "allow_lossy": True}
    engine = make_engine(speculative_config={**METHODS["oracle"], "wrong": 0.0, **on_host})
    checked: set[str] = set()

    def invalid(batch: Any, request_ids: list[str], _: Any) -> Any:
        checked.update(request_ids)
        return batch.expanded_local_pos > 1

    monkeypatch.setattr(model_runner, "grammar_invalid_drafts", invalid)
    outcomes = runner_of(engine).drafter._proposer.outcomes
    outcomes.clear()
    assert tokens(run(engine, scenario, [one[0] for one in truth])) == truth
    theirs = [outcome for outcome in outcomes if outcome.request_id in checked]
    assert max(outcome.num_drafted for outcome in theirs) > 4
    assert max(outcome.num_accepted for outcome in theirs) == 1
