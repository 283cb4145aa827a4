# SPDX-License-Identifier: Apache-2.0
"""Draft trees on the V2 runner: with each part of their layout taken out, the output changes."""

from typing import Any

import pytest
from generation import run, tokens
from scenarios import PROMPTS, Scenario
from test_greedy_identity import METHODS, runner_of
from test_kv_truth import MUTATIONS

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
