# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets along drafts: what vLLM forces in plain decoding, at a cost that stays."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.engine.verifying.thinking_budgets import ThinkingBudgets

PROMPT = [7, 8]


class Counting(ThinkingBudgetStateHolder):
    """Without an engine; counts the tokens that are looked at."""

    def __init__(self, start: list[int], end: list[int]) -> None:
        self.think_start_token_ids = start
        self.think_end_token_ids = end
        self.num_seen = 0

    def _find_last_sequence_index(self, target_list: list[int], token_ids: list[int]) -> int:
        self.num_seen += len(target_list)
        return super()._find_last_sequence_index(target_list, token_ids)


def request_with(budget: int, prompt: list[int]) -> Any:
    params = SimpleNamespace(thinking_token_budget=budget)
    return SimpleNamespace(req_id="a", prompt_token_ids=prompt, sampling_params=params)


def forced_by(
    budgets: ThinkingBudgets, holder: Any, known: Any, output: list[int], **tree: Any
) -> Any:
    batch = DraftBatch.of([tree.get("tokens", [])], [tree.get("parents")])
    return budgets.of_rows(holder, batch, [known], [output])._forced


def plainly(holder: Any, known: Any, output: list[int]) -> int | None:
    """What vLLM forces behind this output, counted token by token from the start."""
    state = holder._init_state_entry(
        known.prompt_token_ids, known.sampling_params.thinking_token_budget
    )
    for length in range(len(output) + 1):
        state.update(output_tok_ids=output[:length], spec_token_ids=[], force_index=[])
        holder._update_think_state(state)
    end: list[int] = holder.think_end_token_ids
    is_forced = state["in_end"] and state["force_index"] and state["end_count"] < len(end)
    return end[state["end_count"]] if is_forced else None


@pytest.mark.parametrize("end", [[2], [2, 3], [2, 3, 2]])
@pytest.mark.parametrize("start", [[1], [1, 4]])
@pytest.mark.parametrize("thinks", [False, True])
def test_it_forces_what_plain_decoding_does(start: list[int], end: list[int], thinks: bool) -> None:
    """Also in the branches of a tree; texts in which thoughts begin and end often."""
    holder, generator = Counting(start, end), np.random.default_rng(3)
    known = request_with(5, PROMPT + start if thinks else PROMPT)
    output: list[int] = []
    budgets, num_forced = ThinkingBudgets(), 0
    for _ in range(60):
        tokens = generator.integers(0, 6, 5).tolist()
        parents = [-1, 0, -1, 2, 2]
        found = forced_by(budgets, holder, known, output, tokens=tokens, parents=parents)
        paths = [[], tokens[:1], tokens[:2], tokens[2:3], tokens[2:4], [tokens[2], tokens[4]]]
        for row, path in enumerate(paths):
            assert found.get(row) == plainly(holder, known, output + path), output + path
        num_forced += len(found)
        accepted = paths[generator.integers(len(paths))]
        output = [*output, *accepted, int(generator.integers(0, 6))]
    assert num_forced > 20


def test_a_long_thought_costs_no_more_than_a_short_one() -> None:
    holder, budgets, known = Counting([1], [2]), ThinkingBudgets(), request_with(10**6, PROMPT)
    output = [1, *[5] * 4000]
    forced_by(budgets, holder, known, output)
    assert holder.num_seen < 10 * len(output)
    holder.num_seen = 0
    forced_by(budgets, holder, known, [*output, 5], tokens=[5] * 32)
    assert holder.num_seen < 10 * 33
