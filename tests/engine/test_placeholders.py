# SPDX-License-Identifier: Apache-2.0
"""Requests that come with one token left to read verify none that nobody drafted."""

from typing import Any

import pytest
from generation import sampling_params
from test_greedy_identity import runner_of

from vllm_spec_ext.engine.placeholders import without_placeholders

# The first block of 32 is cached when the prompt comes again; the last token is read anew.
PROMPT = {"prompt_token_ids": [100 + token for token in range(33)]}
INPUT_COPY = {"method": "input_copy", "num_speculative_tokens": 8}
NUM_TOKENS = 12


def verified_rows(engine: Any, params: Any) -> tuple[list[int], list[int], list[int]]:
    """Run the prompt twice.

    Returns:
        The tokens of the second run, which rows vLLM scheduled for its first step (-1 = one that
        nobody drafted), and which of them were verified.
    """
    runner, scheduler = runner_of(engine), engine.llm_engine.engine_core.engine_core.scheduler
    verified, scheduled = [], []
    make, schedule = runner.step_drafts.make, scheduler.schedule

    def watched_make(step: Any, *args: Any) -> Any:
        verified.append([token for draft in step.drafts for token in draft])
        return make(step, *args)

    def watched_schedule(*args: Any) -> Any:
        step = schedule(*args)
        if step.num_scheduled_tokens:  # not while a grammar is compiled
            drafts = step.scheduled_spec_decode_tokens.values()
            scheduled.append([token for draft in drafts for token in draft])
        return step

    engine.generate(PROMPT, params, use_tqdm=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.step_drafts, "make", watched_make)
        patch.setattr(scheduler, "schedule", watched_schedule)
        (out,) = engine.generate(PROMPT, params, use_tqdm=False)
    assert out.num_cached_tokens == 32
    return list(out.outputs[0].token_ids), scheduled[0], verified[0]


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_cached_prompt_verifies_no_placeholders_where_lengths_differ_anyway(
    adaptive: bool, make_engine: Any
) -> None:
    params = sampling_params({"max_tokens": NUM_TOKENS, "ignore_eos": True})
    (out,) = make_engine().generate(PROMPT, params, use_tqdm=False)
    engine = make_engine(speculative_config={**INPUT_COPY, "adaptive_length": adaptive})
    found, scheduled, verified = verified_rows(engine, params)
    assert found == list(out.outputs[0].token_ids)
    assert scheduled == [-1] * 8
    assert verified == ([] if adaptive else scheduled)


def test_with_a_grammar_they_stay(make_engine: Any) -> None:
    """Its mask has rows for them."""
    grammar = {"regex": "(ab|cd){6,9}"}
    params = sampling_params({"max_tokens": NUM_TOKENS, "structured_outputs": grammar})
    (out,) = make_engine().generate(PROMPT, params, use_tqdm=False)
    engine = make_engine(speculative_config={**INPUT_COPY, "adaptive_length": True})
    found, scheduled, verified = verified_rows(engine, params)
    assert found == list(out.outputs[0].token_ids)
    assert verified == scheduled == [-1] * 8


def test_a_step_without_any_is_left_as_it_is() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    step = SchedulerOutput.make_empty()
    assert without_placeholders(step) is step
    step.num_scheduled_tokens = {"a": 3, "b": 5}
    step.total_num_scheduled_tokens = 8
    step.scheduled_spec_decode_tokens = {"a": [7, 9], "b": [-1] * 4}
    found = without_placeholders(step)
    assert found.num_scheduled_tokens == {"a": 3, "b": 1}
    assert found.total_num_scheduled_tokens == 4
    assert found.scheduled_spec_decode_tokens == {"a": [7, 9]}
    assert step.total_num_scheduled_tokens == 8, "the scheduler's own stays as it was"
    assert step.scheduled_spec_decode_tokens["b"] == [-1] * 4
