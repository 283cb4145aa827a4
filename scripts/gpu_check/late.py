# SPDX-License-Identifier: Apache-2.0
"""Drafts that are made on the device, behind tokens that the host has not read."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from generation import ALWAYS_DRAFT, run, tokens
from scenarios import SCENARIOS
from test_blockwise_engine import save_random_heads
from test_corpus_engine import save_corpus
from test_greedy_identity import runner_of

from gpu_check.identity import BACKEND
from gpu_check.site import CheckFailed, Site, require, require_identical

COPY = {"method": "input_copy", "num_speculative_tokens": 8}
SCENARIO = SCENARIOS["few_tokens"]
FEW_TOKENS = [40, 42, 44]  # those of the scenario
AS_MANY_AS_A_TREE = 2.0  # steps of a chain, for each of a tree


def late_tables(site: Site) -> dict[str, Any]:
    """No token changes, as much is accepted, and how long the look-up takes."""
    return _compare(site, COPY)


def late_heads(site: Site) -> dict[str, Any]:
    """The same of heads; they copy what followed before."""
    heads = save_random_heads(site.folder / "late_heads", FEW_TOKENS, 4, copy_trust=100.0)
    return _compare(site, {"method": "blockwise", "model": str(heads), "num_speculative_tokens": 3})


def late_ngram(site: Site) -> dict[str, Any]:
    """The same of chains of tri-grams."""
    method = {"method": "adaptive_ngram", "tree": False, "num_speculative_tokens": 8}
    return _compare(site, method)


def late_auto(site: Site) -> dict[str, Any]:
    """The same of heads, copies and tri-grams of a corpus of the answers behind them, whose chains
    accept less than trees do step by step."""
    folder = site.folder / "late_auto"
    heads = save_random_heads(folder / "heads", FEW_TOKENS, 4, copy_trust=100.0)
    drafter = {"method": "blockwise", "model": str(heads)}
    plain = site.engine(backend=BACKEND)
    outputs = run(plain, SCENARIO)
    corpus = save_corpus(plain.llm_engine.model_config.model, outputs, folder)
    method = {"method": "auto", "drafter": drafter, "corpus": corpus, "num_speculative_tokens": 8}
    return _compare(site, method, AS_MANY_AS_A_TREE, tokens(outputs))


def _compare(
    site: Site,
    method: dict[str, Any],
    most_steps: float = 1.02,
    answers: Sequence[Any] | None = None,
) -> dict[str, Any]:
    answers = answers or tokens(run(site.engine(backend=BACKEND), SCENARIO))
    steps, compared, draft_us = [], 0, list[float]()
    config = {**method, **ALWAYS_DRAFT}  # no clock decides how many steps there are
    for is_async in (False, True):
        engine = site.engine(backend=BACKEND, speculative_config=config, async_scheduling=is_async)
        runner = runner_of(engine)
        require(
            (runner.late_steps is not None) == is_async,
            f"async_scheduling={is_async}: late_steps is {runner.late_steps}",
        )
        with pytest.MonkeyPatch.context() as patch:
            counted = count_steps(runner, patch)
            found = tokens(run(engine, SCENARIO))
            if runner.late_steps is not None:
                runner.late_steps.read_if_told()  # the last step, as before the next one
        if is_async:
            # Apart: it waits for the device, which would hide what is read too early or too late.
            with pytest.MonkeyPatch.context() as patch:
                time_draft(runner, patch, draft_us)
                run(engine, SCENARIO)
        for true, ours in zip(answers, found, strict=True):
            compared += require_identical(
                f"{method['method']}, asynchronous: {is_async}", true, ours
            )
        steps.append(len(counted))
    result = {
        "compared": compared,
        "request_steps": dict(zip(("sync", "async"), steps, strict=True)),
        "draft_us": statistics.median(draft_us),
    }
    if steps[1] > most_steps * steps[0] + 1:
        raise CheckFailed(f"{steps} request steps, expected as few asynchronously", result)
    return result


def count_steps(runner: Any, patch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each request in each step from now on, where it got some."""
    steps: list[int] = []
    make = runner.step_drafts.make

    def count(step: Any, new_tokens: Any, *arguments: Any) -> Any:
        steps.extend(len(tokens) for tokens in new_tokens if tokens)
        return make(step, new_tokens, *arguments)

    patch.setattr(runner.step_drafts, "make", count)
    return steps


def time_draft(runner: Any, patch: pytest.MonkeyPatch, taken_us: list[float]) -> None:
    """Microseconds of each draft, rows on the host and copies included; nothing else runs."""
    draft = runner.drafter.late.draft

    def timed(*arguments: Any) -> Any:
        torch.accelerator.synchronize()
        started = time.perf_counter()
        drafts = draft(*arguments)
        torch.accelerator.synchronize()
        taken_us.append(1e6 * (time.perf_counter() - started))
        return drafts

    patch.setattr(runner.drafter.late, "draft", timed)
