# SPDX-License-Identifier: Apache-2.0
"""Attention backends verify trees that make more virtual requests than the engine has requests.

Their metadata builders may keep buffers of as many rows as the engine has requests (vLLM 0.32
``FlashAttentionMetadataBuilder``). Here the engine has two, and every tree makes more by itself.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from generation import run
from scenarios import PROMPTS, Scenario
from test_greedy_identity import runner_of
from test_kv_truth import no_ancestor_writes, no_commit

from gpu_check.identity import firsts
from gpu_check.site import CheckFailed, Site, first_difference, require, require_identical

MOST_REQUESTS = 2
TREE = {"method": "oracle", "num_speculative_tokens": 16, "branches": 8, "wrong": 0.1}
SCENARIO = Scenario([{"max_tokens": 48, "ignore_eos": True, "logprobs": 5}], PROMPTS)
LEAST_COMPARED = 0.25  # of the tokens; a random model has many that are about as likely
BFLOAT16_TOLERANCE = 0.25  # of a log-probability; a wrong layout is off by whole units
CONTROLS = (no_commit, no_ancestor_writes)


def triton_attention(site: Site) -> dict[str, Any]:
    """In float32: token for token."""
    plain, engine = engines(site, "TRITON_ATTN", "float32")
    expected = firsts(run(plain, SCENARIO))
    widest = run_with_trees(engine, expected)
    compared = require_identical("trees on TRITON_ATTN", expected, widest.answers)
    controls = {}
    for mutate in CONTROLS:
        answers = run_with_trees(engine, expected, mutate).answers
        controls[mutate.__name__] = sum(
            first_difference(true, ours) is not None
            for true, ours in zip(expected, answers, strict=True)
        )
    return {"compared": compared, **widest.facts(), **require_controls(controls)}


def flash_attention(site: Site) -> dict[str, Any]:
    """In bfloat16, so by log-probabilities: of every token up to the first one that differs.

    16 bits round by the shape of a batch, so that two nearly equal logits may swap places.
    """
    plain, engine = engines(site, "FLASH_ATTN", "bfloat16")
    reference = run(plain, SCENARIO)
    expected = firsts(reference)
    widest = run_with_trees(engine, expected)
    found = require_agreement("trees on FLASH_ATTN", reference, widest.outputs, **widest.facts())
    whole = sum(len(answer) for answer in expected)
    controls = {}
    for mutate in CONTROLS:
        same, off = agreement(reference, run_with_trees(engine, expected, mutate).outputs)
        controls[mutate.__name__] = int(off >= BFLOAT16_TOLERANCE or same <= 0.5 * whole)
    return {**found, **require_controls(controls)}


def engines(site: Site, backend: str, dtype: str) -> tuple[Any, Any]:
    """One that does not draft, and one that verifies wide trees; they know two requests."""
    sizes: dict[str, Any] = {"dtype": dtype, "max_num_seqs": MOST_REQUESTS, "backend": backend}
    plain = site.engine(**sizes)
    engine = site.engine(speculative_config=TREE, **sizes)
    trees = runner_of(engine).tree_attention
    require(trees is not None, f"{backend}: this engine does not verify branches, see its log")
    if site.on_gpu:
        found = runner_of(engine).attn_groups[0][0].backend.get_name()
        require(found == backend, f"attention backend {found}, expected {backend}")
    return plain, engine


class TreeRun:
    """Answers of an engine, and how wide its steps were."""

    def __init__(self, outputs: Sequence[Any], widths: Sequence[int]) -> None:
        self.outputs = outputs
        self.answers = firsts(outputs)
        self._widths = widths

    def facts(self) -> dict[str, int]:
        """Raises CheckFailed unless many steps had more virtual requests than the engine has."""
        wide = sum(width > MOST_REQUESTS for width in self._widths)
        found = {"steps_with_trees": len(self._widths), "wider_than_the_engine": wide}
        if wide < 10:
            raise CheckFailed(
                f"{wide} steps had more than {MOST_REQUESTS} virtual requests, expected at least "
                "10: nothing is proved",
                found,
            )
        return {**found, "most_virtual_requests": max(self._widths)}


def run_with_trees(engine: Any, truths: Sequence[Sequence[int]], mutate: Any = None) -> TreeRun:
    """Answer with the true answers drafted in later branches.

    Args:
        engine: Its drafter is the oracle.
        truths: Answers of plain decoding.
        mutate: Takes a part of the layout out.
    """
    trees = runner_of(engine).tree_attention
    plan_step, widths = trees.plan_step, []

    def watch(*arguments: Any) -> None:
        plan_step(*arguments)
        if trees.plan is not None:
            widths.append(len(trees.plan.request_of))

    engine.reset_prefix_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "plan_step", watch)
        if mutate is not None:
            mutate(engine, patch)
        outputs = run(engine, SCENARIO, truths)
    engine.reset_prefix_cache()  # blocks of a mutated layout hold the wrong KV
    return TreeRun(outputs, widths)


def agreement(reference: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, float]:
    """Tokens that are alike, and the largest difference of one's log-probability.

    Where two texts part, it is what our token lies behind the one that plain decoding chose, to
    plain decoding: rounding parts texts only where two tokens are about as likely.
    """
    num_tokens, largest = 0, 0.0
    for true, ours in zip(reference, outputs, strict=True):
        one, other = true.outputs[0], ours.outputs[0]
        end = first_difference(one.token_ids, other.token_ids)
        for place in range(len(one.token_ids) if end is None else end):
            token = one.token_ids[place]
            off = abs(one.logprobs[place][token].logprob - other.logprobs[place][token].logprob)
            num_tokens, largest = num_tokens + 1, max(largest, off)
        if end is not None:
            likely, ours_there = one.logprobs[end], other.token_ids[end]
            chosen = likely[one.token_ids[end]].logprob
            behind = likely[ours_there].logprob if ours_there in likely else float("-inf")
            largest = max(largest, chosen - behind)
    return num_tokens, largest


def require_agreement(
    what: str, reference: Sequence[Any], outputs: Sequence[Any], **found: Any
) -> dict[str, Any]:
    """Figures of answers in 16 bits beside those of plain decoding, with what else was found.

    Raises:
        CheckFailed: They part early, or a log-probability is off by more than rounding.
    """
    num_tokens, largest = agreement(reference, outputs)
    whole = sum(len(out.outputs[0].token_ids) for out in reference)
    found = {"compared": num_tokens, "tokens": whole, "largest_difference": largest, **found}
    require(
        num_tokens > LEAST_COMPARED * whole,
        f"{what}: {num_tokens} of {whole} tokens until texts part, expected more than a quarter",
        **found,
    )
    require(
        largest < BFLOAT16_TOLERANCE,
        f"{what}: a log-probability differs by {largest:.3f}, expected less than "
        f"{BFLOAT16_TOLERANCE}",
        **found,
    )
    return found


def require_controls(controls: dict[str, int]) -> dict[str, Any]:
    """Raises CheckFailed unless each mutation was noticed."""
    for name, noticed in controls.items():
        require(
            noticed,
            f"control {name}: with this part of the layout taken out nothing changed, expected "
            "other texts: the check proves nothing",
            controls=controls,
        )
    return {"controls": controls}
