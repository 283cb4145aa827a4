# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of every kind that vLLM offers are those of plain decoding."""

from typing import Any

import pytest
from generation import assert_equal_logprobs, run, tokens
from scenarios import PROMPTS, Scenario
from test_greedy_identity import METHODS, runner_of
from worker_counts import kept_counts

SCENARIO = Scenario(
    [
        {"max_tokens": 16, "logprobs": 3, "repetition_penalty": 1.3},
        {"max_tokens": 16, "logprobs": 2, "temperature": 0.7, "seed": 8, "top_k": 20},
        {"max_tokens": 5, "logprobs": -1},  # of the whole vocabulary
        {"max_tokens": 16},
    ],
    PROMPTS[:4],
)


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_they_are_those_of_plain_decoding(
    mode: str, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"logprobs_mode": mode, "max_logprobs": -1, "max_num_batched_tokens": 2048}
    reference = run(make_engine(**asked), SCENARIO)
    true = [completions[0] for completions in tokens(reference)]
    assert len(reference[2].outputs[0].logprobs[0]) >= 512
    for name in ("oracle", "oracle_tree"):
        engine = make_engine(speculative_config=METHODS[name], **asked)
        counted = kept_counts(runner_of(engine), monkeypatch)
        outputs = run(engine, SCENARIO, true)
        assert counted()["counts"]["accepted_nodes"] > 10
        assert tokens(outputs) == tokens(reference)
        assert_equal_logprobs(outputs, reference, 1e-3)
