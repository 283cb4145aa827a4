# SPDX-License-Identifier: Apache-2.0
"""Float32 texts are plain decoding's, token for token, whatever is drafted."""

from typing import Any

import pytest
from generation import run, tokens
from scenarios import PROMPTS, SCENARIOS, Scenario
from test_greedy_identity import METHODS, runner_of

from gpu_check.site import CheckFailed, Site, require, require_identical
from vllm_spec_ext.bench.prompts import BUNDLED, Question, load

BACKEND = "TRITON_ATTN"  # FlashAttention has no float32
ORACLES = ("oracle", "oracle_tree")
NAMES = ("mixed_lengths", "penalties", "few_tokens", "json_schema")
LONG_RUN = Scenario([{"max_tokens": n, "ignore_eos": True} for n in (12, 40, 33, 1)], PROMPTS)
SMALL_METHODS: dict[str, dict[str, Any]] = {
    "input_copy": {"method": "input_copy"},
    "adaptive_ngram": {"method": "adaptive_ngram"},
    "suffix_tree": {"method": "suffix_tree"},
}
SMALL_SIZES: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 512 << 20,
}
SMALL_PROMPTS, SMALL_TOKENS = 12, 64


def firsts(outputs: Any) -> list[list[int]]:
    """Tokens of the first completion of each prompt."""
    return [completions[0] for completions in tokens(outputs)]


def compare(
    site: Site,
    names: tuple[str, ...],
    methods: tuple[str, ...],
    *,
    least_accepted: float = 0.2,
    **arguments: Any,
) -> dict[str, Any]:
    """Each method in each scenario against an engine that does not draft.

    Args:
        site: Where.
        names: Of the scenarios.
        methods: Of the tests' methods.
        least_accepted: Part of the oracles' drafts that must be accepted.
        arguments: Of all engines.

    Returns:
        ``compared`` tokens, and what became of the oracles' drafts.

    Raises:
        CheckFailed: A token differs, or nothing was accepted where much should be.
    """
    plain = site.engine(**arguments)
    expected = {name: run(plain, SCENARIOS[name]) for name in names}
    compared, drafts = 0, {}
    for method in methods:
        engine = site.engine(speculative_config=METHODS[method], **arguments)
        outcomes = getattr(runner_of(engine).drafter._proposer, "outcomes", [])
        outcomes.clear()
        for name in names:
            truths = firsts(expected[name]) if method in ORACLES else None
            found = tokens(run(engine, SCENARIOS[name], truths))
            for answers, true in zip(found, tokens(expected[name]), strict=True):
                compared += require_identical(f"{method} in {name}", true, answers)
        if method in ORACLES:
            drafted = sum(outcome.num_drafted for outcome in outcomes)
            accepted = sum(outcome.num_accepted for outcome in outcomes)
            drafts[method] = {"drafted": drafted, "accepted": accepted}
            require(
                drafted > 100 and accepted > least_accepted * drafted,
                f"{method}: {accepted} of {drafted} draft tokens were accepted, expected more than "
                f"{least_accepted:.0%} of more than 100: identity would prove nothing",
                **drafts,
            )
    return {"compared": compared, "drafts": drafts}


def identity_tiny(site: Site) -> dict[str, Any]:
    """Chains, trees, n-grams and copies on the tiny model."""
    methods = (*ORACLES, "input_copy", "adaptive_ngram_chain", "adaptive_ngram_tree")
    found = compare(site, NAMES, methods, backend=BACKEND)
    if hasattr(runner_of(site.engine(backend=BACKEND)), "req_states"):  # V2: noise by position
        found["compared_seeded"] = seeded_trees(site)["compared"]
    return found


def seeded_trees(site: Site) -> dict[str, Any]:
    """Trees give plain sampling's tokens; what the oracle knows is one completion of two."""
    return compare(site, ("seeded",), ORACLES[1:], least_accepted=0.1, backend=BACKEND)


def identity_async(site: Site) -> dict[str, Any]:
    """The asynchronous scheduler runs ahead; no token changes, and few steps are added."""
    answers = firsts(run(site.engine(backend=BACKEND), LONG_RUN))
    compared, steps = 0, {}
    for method in ORACLES:
        counts = []
        for is_async in (False, True):
            engine = site.engine(
                backend=BACKEND, speculative_config=METHODS[method], async_scheduling=is_async
            )
            require(
                runner_of(engine).is_async == is_async,
                f"async_scheduling={is_async}: the runner found {runner_of(engine).is_async}",
            )
            with pytest.MonkeyPatch.context() as patch:
                made = count_steps(engine, patch)
                found = firsts(run(engine, LONG_RUN, answers))
            compared += require_identical(f"{method}, asynchronous: {is_async}", answers, found)
            counts.append(len(made))
        steps[method] = {"sync": counts[0], "async": counts[1]}
        # One for each request that stops: it takes part in a step that was queued already.
        if counts[1] > counts[0] + len(PROMPTS):
            raise CheckFailed(f"{method}: {steps[method]} steps, expected few more", steps)
    return {"compared": compared, "steps": steps}


def count_steps(engine: Any, patch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each step from now on."""
    drafts, made = runner_of(engine).step_drafts, list[None]()
    make = drafts.make

    def count(*arguments: Any) -> Any:
        made.append(None)
        return make(*arguments)

    patch.setattr(drafts, "make", count)
    return made


def identity_small(site: Site) -> dict[str, Any]:
    """A model of 135 million parameters, with the CUDA graphs that vLLM takes by itself."""
    model = site.small_model or _demo_model()
    sizes = {**SMALL_SIZES, "model": model, "backend": BACKEND, "enforce_eager": not site.on_gpu}
    plain = site.engine(**sizes)
    room = plain.llm_engine.vllm_config.model_config.max_model_len - SMALL_TOKENS
    ids = [encode(plain.get_tokenizer(), question)[:room] for question in _questions()]
    scenario = Scenario([{"max_tokens": SMALL_TOKENS}], [{"prompt_token_ids": one} for one in ids])
    expected = firsts(run(plain, scenario))
    compared, steps = 0, {}
    for name, config in SMALL_METHODS.items():
        engine = site.engine(speculative_config=config, **sizes)
        with pytest.MonkeyPatch.context() as patch:
            made = count_steps(engine, patch)
            compared += require_identical(name, expected, firsts(run(engine, scenario)))
        steps[name] = len(made)
    return {"compared": compared, "steps": steps}


def encode(tokenizer: Any, question: Question) -> list[int]:
    """Prompt tokens of a question's first turn."""
    messages = list(question.opening)
    found: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(found)


def _questions() -> list[Question]:
    return load(BUNDLED, field="prompt", template=None, limit=SMALL_PROMPTS)


def _demo_model() -> str:
    from vllm_spec_ext.cli.demo_model import ensure_demo_model

    return str(ensure_demo_model())
