# SPDX-License-Identifier: Apache-2.0
"""Run batches on an engine and compare what comes out."""

from collections.abc import Sequence
from typing import Any

import pytest
from scenarios import LONG, Scenario

# Options of a method under which no clock decides how much is drafted.
ALWAYS_DRAFT = {"adaptive_length": False}


def sampling_params(given: dict[str, Any], extra: dict[str, Any] | None = None) -> Any:
    """vLLM's SamplingParams, greedy unless said otherwise."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    values = {"temperature": 0.0, **given}
    if "structured_outputs" in values:
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    return SamplingParams(**values, extra_args={"spec_ext": extra} if extra else None)


def run(
    engine: Any, scenario: Scenario, truths: Sequence[Sequence[int]] | None = None
) -> list[Any]:
    """Generate for all prompts of a scenario at once.

    Args:
        engine: An ``LLM``.
        scenario: What to run.
        truths: For test drafters: the true output of each prompt.
    """
    params = []
    for i in range(len(scenario.prompts)):
        given = scenario.params[i % len(scenario.params)]
        extra = {"truth": list(truths[i])} if truths is not None else None
        params.append(sampling_params(given, extra))
    return engine.generate(scenario.prompts, params, use_tqdm=False)


def tokens(outputs: Sequence[Any]) -> list[list[list[int]]]:
    """Token ids of every completion of every prompt."""
    return [[list(completion.token_ids) for completion in out.outputs] for out in outputs]


def run_with_aborts(
    engine: Any,
    scenario: Scenario,
    aborted: Sequence[int],
    at_step: int,
    truths: Sequence[Sequence[int]] | None = None,
) -> dict[int, list[int]]:
    """Generate for all prompts of a scenario; some are aborted on the way.

    Args:
        engine: An ``LLM``.
        scenario: What to run.
        aborted: Places of the prompts that are aborted.
        at_step: Before which step of the engine.
        truths: For test drafters: the true output of each prompt.

    Returns:
        Token ids of the others, by place.
    """
    core, finished = engine.llm_engine, {}
    for i, prompt in enumerate(scenario.prompts):
        extra = {"truth": list(truths[i])} if truths is not None else None
        core.add_request(f"abort-{i}", prompt, sampling_params(scenario.params[i], extra))
    for step in range(1000):
        if step == at_step:
            core.abort_request([f"abort-{i}" for i in aborted])
        for out in core.step():
            if out.finished and out.outputs[0].finish_reason != "abort":
                place = int(out.request_id.removeprefix("abort-"))
                finished[place] = list(out.outputs[0].token_ids)
        if not core.has_unfinished_requests():
            break
    return finished


def count_preempted(engine: Any, patch: pytest.MonkeyPatch) -> list[str]:
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def count(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    patch.setattr(scheduler, "_preempt_request", count)
    return preempted


def same_tokens_twice(engine: Any, expected_long: Any) -> None:
    """Answers to prompts of many pages; the second time these are found in the prefix cache."""
    engine.reset_prefix_cache()
    for turn in range(2):
        outputs = run(engine, LONG)
        assert tokens(outputs) == expected_long
        cached = sum(out.num_cached_tokens for out in outputs)
        assert cached > 700 if turn else cached < 700


def assert_equal_logprobs(outputs: Sequence[Any], reference: Sequence[Any], abs_: float) -> None:
    """The same tokens at every place of every answer, with the same log-probabilities.

    Args:
        outputs: What an engine gave for its prompts.
        reference: What another one gave for them.
        abs_: Most by which two log-probabilities may differ.
    """
    for ours, theirs in zip(outputs, reference, strict=True):
        a, b = ours.outputs[0].logprobs, theirs.outputs[0].logprobs
        assert (a is None) == (b is None)
        for one, other in zip(a or (), b or (), strict=True):
            assert one.keys() == other.keys()
            for token, entry in one.items():
                assert entry.logprob == pytest.approx(other[token].logprob, abs=abs_)
