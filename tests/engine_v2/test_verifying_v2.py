# SPDX-License-Identifier: Apache-2.0
"""Relaxed rules, eta sampling, hidden states and drawn drafts on the V2 runner.

The tests of V1, as far as they ask for nothing of its runner.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation import assert_equal_logprobs, run, sampling_params, tokens
from homogeneity import same_distribution_p_value
from sampling_distributions import SAME, Chances, first_tokens
from scenarios import PROMPTS, SCENARIOS, Scenario
from test_blockwise_engine import heads
from test_grammar_ends import (
    engines,
    marks,
    test_no_rule_lets_a_draft_outlive_a_thinking_budget,
    thinker,
)
from test_greedy_identity import (
    METHODS,
    runner_of,
    test_what_was_foreseen_belongs_to_the_row_of_the_request,
)
from test_logprobs_modes import test_they_are_those_of_plain_decoding
from test_relaxed_rules import (
    expected,
    test_a_request_may_ask_for_the_exact_rule,
    test_eta_cuts_what_is_improbable,
    test_min_block_takes_drafts_and_reports_the_targets_logprobs,
)
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from vllm_spec_ext.engine.v2 import rejection

__all__ = [
    "engines",
    "expected",
    "heads",
    "marks",
    "test_a_request_may_ask_for_the_exact_rule",
    "test_eta_cuts_what_is_improbable",
    "test_min_block_takes_drafts_and_reports_the_targets_logprobs",
    "test_no_rule_lets_a_draft_outlive_a_thinking_budget",
    "test_they_are_those_of_plain_decoding",
    "test_what_was_foreseen_belongs_to_the_row_of_the_request",
    "thinker",
]

NUM_SAMPLES = 80


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_hidden_states_of_the_last_accepted_rows(
    tree: bool, heads: Path, plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's last layer turns them into the tokens that were just drawn."""
    config = {
        "method": "blockwise",
        "model": str(heads),
        "tree": tree,
        "num_speculative_tokens": 8 if tree else 3,
        "adaptive_length": False,
    }
    engine = make_engine(speculative_config=config)
    rows: list[tuple[int, int]] = []
    runner = runner_of(engine)
    propose = runner.drafter._proposer.propose

    def look(step: Any) -> Any:
        if step.requests:
            best = runner.model.compute_logits(step.hidden_states).argmax(dim=-1).tolist()
            rows.extend(
                (token, request.new_tokens[-1])
                for token, request in zip(best, step.requests, strict=True)
            )
        return propose(step)

    monkeypatch.setattr(runner.drafter._proposer, "propose", look)
    scenario = SCENARIOS["mixed_lengths"]
    assert tokens(run(engine, scenario)) == tokens(run(plain, scenario))
    assert len(rows) > 50
    assert all(token == drawn for token, drawn in rows)


def test_drawn_drafts_are_verified_with_what_they_were_drawn_from(
    plain: Any, make_engine: Any
) -> None:
    """More of them are accepted than without, and the output keeps its distribution."""
    engine = make_engine(speculative_config={"method": "drawn", "num_speculative_tokens": 8})
    chances = Chances(plain)
    given = chances.params("temperature_1")
    likely = [token for token in chances.tokens if token in given["allowed_token_ids"]]
    draft = {token: (i + 1) / 10 for i, token in enumerate(likely)}  # likeliest where p is least
    outcomes, accepted = runner_of(engine).drafter._proposer.outcomes, []
    samples: list[Any] = []
    for shown in (False, True):
        extra = {"distribution": draft, "parents": [-1, 0, 1], "show_distributions": shown}
        outcomes.clear()
        np.random.seed(int(shown))  # vLLM's V2 draws the seeds of requests that have none
        samples.append(first_tokens(engine, [sampling_params(given, extra)] * NUM_SAMPLES))
        accepted.append(sum(outcome.num_accepted for outcome in outcomes) / len(outcomes))
    assert accepted[1] > 1.1 * accepted[0]
    np.random.seed(2)
    found = first_tokens(plain, [sampling_params({**given, "max_tokens": 3})] * NUM_SAMPLES)
    for sample in samples:
        assert same_distribution_p_value(sample, found) > SAME


def test_a_seeded_text_does_not_depend_on_draws(plain: Any, make_engine: Any) -> None:
    engine = make_engine(speculative_config={"method": "drawn", "num_speculative_tokens": 8})
    allowed = {"allowed_token_ids": [40, 42, 44], "temperature": 1.0, "seed": 5}
    given = {"max_tokens": 16, "ignore_eos": True, **allowed}
    extra = {"distribution": {40: 0.5, 42: 0.25, 44: 0.25}, "parents": [-1, 0, -1, 2]}
    answers = tokens(run(plain, Scenario([given], PROMPTS)))
    params = [sampling_params(given, extra)] * len(PROMPTS)
    assert tokens(engine.generate(PROMPTS, params, use_tqdm=False)) == answers


def test_bad_words_and_penalties_follow_the_branch(plain: Any, make_engine: Any) -> None:
    """In a tree the rows before a row are other branches."""
    base = run(plain, Scenario([{"max_tokens": 24, "ignore_eos": True}], PROMPTS[:4]))
    params = []
    for out in base:
        text = out.outputs[0].text
        params.append(
            {
                "max_tokens": 24,
                "ignore_eos": True,
                "bad_words": [text[6:10], text[12:14]],
                "frequency_penalty": 1.0,
                "min_tokens": 5,
            }
        )
    scenario = Scenario(params, PROMPTS[:4])
    answers = tokens(run(plain, scenario))
    engine = make_engine(speculative_config=METHODS["oracle_tree"])
    truths = [completions[0] for completions in answers]
    assert tokens(run(engine, scenario, truths)) == answers


def test_penalties_see_the_drafts_of_a_request_that_has_hardly_begun(
    plain: Any, make_engine: Any
) -> None:
    """vLLM takes rows of a tree for padding then, as their positions are those of their depths."""
    engine = make_engine(speculative_config={"method": "fixed", "num_speculative_tokens": 16})
    given = {
        "max_tokens": 12,
        "ignore_eos": True,
        "allowed_token_ids": [40, 42],
        "frequency_penalty": 2.0,
    }
    answers = tokens(run(plain, Scenario([given], PROMPTS)))
    assert any(len(set(answer[0][:4])) == 2 for answer in answers)
    # Whatever the target says next is there, behind a branch that is wrong.
    tree = {"tokens": [41, 40, 42, 40, 42, 40, 42], "parents": [-1, -1, -1, 1, 1, 2, 2]}
    params = [sampling_params(given, tree)] * len(PROMPTS)
    found = engine.generate(PROMPTS, params, use_tqdm=False)
    assert tokens(found) == answers


@pytest.mark.parametrize("rule", [None, {"type": "top_k", "k": 3}], ids=["exact", "relaxed"])
def test_a_huge_step_is_verified_in_parts(
    rule: Any, plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM bounds the memory of its own; here that is reached with 24 rows."""
    relaxed = {} if rule is None else {"scorer": rule, "allow_lossy": True}
    engine = make_engine(speculative_config={**METHODS["oracle_tree"], **relaxed})
    scenario = Scenario(
        [
            {"max_tokens": 16, "ignore_eos": True, "repetition_penalty": 1.3, "logprobs": 2},
            {"max_tokens": 16, "ignore_eos": True, "logprobs": 1},
        ],
        PROMPTS,
    )
    reference = run(plain, scenario)
    truths = [completions[0] for completions in tokens(reference)]
    whole = run(engine, scenario, truths)
    engine.reset_prefix_cache()
    numbers: list[int] = []
    join = rejection.joined

    def counted(walks: Any) -> Any:
        numbers.append(len(walks))
        return join(walks)

    monkeypatch.setattr(rejection, "joined", counted)
    vocab_size = engine.llm_engine.vllm_config.model_config.get_vocab_size()
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", 24 * 4 * vocab_size)
    parts = run(engine, scenario, truths)
    assert max(numbers) > 2
    assert tokens(parts) == tokens(whole)
    assert rule is not None or tokens(parts) == tokens(reference)
    assert all(out.outputs[0].logprobs is not None for out in whole)
    assert_equal_logprobs(parts, whole, 2e-4)


class Counting(LogitsProcessor):
    """A third party's, with a state: each call forbids one token more."""

    def __init__(self) -> None:
        self.num_calls = 0

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Forbid them in all rows."""
        self.num_calls += 1
        logits[:, 40 : 40 + self.num_calls] = float("-inf")
        return logits


@pytest.mark.parametrize("given", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", ["oracle", "oracle_tree"])
def test_a_relaxed_rule_asks_processors_once_a_step(
    name: str, given: dict[str, Any], plain: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of third parties may keep state; the rule and the draws know what they forbid."""
    scenario = Scenario([{"max_tokens": 16, "ignore_eos": True, **given}], PROMPTS[:3])
    truths = [completions[0] for completions in tokens(run(plain, scenario))]
    relaxed = {"scorer": {"type": "top_k", "k": 3}, "allow_lossy": True}
    engine = make_engine(speculative_config={**METHODS[name], **relaxed})
    runner, processor = runner_of(engine), Counting()
    ours = [*runner.sampler.logits_processors, processor]
    monkeypatch.setattr(runner.sampler, "logits_processors", ours)
    calls_by_step: list[int] = []
    sample_tokens = runner.sample_tokens

    def counted(*args: Any) -> Any:
        output = sample_tokens(*args)
        calls_by_step.append(processor.num_calls)
        return output

    monkeypatch.setattr(runner, "sample_tokens", counted)
    found = tokens(run(engine, scenario, truths))
    assert len(calls_by_step) > 3
    assert calls_by_step == list(range(1, len(calls_by_step) + 1))
    assert all(40 not in completion for completions in found for completion in completions)
