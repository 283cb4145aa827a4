# SPDX-License-Identifier: Apache-2.0
"""The KV cache after accepted branches is what a fresh prefill of the same tokens would hold.

And the machinery that makes it so is needed: with each part of it taken out, the output changes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import run, sampling_params, tokens
from scenarios import PROMPTS, Scenario
from test_greedy_identity import runner_of

from vllm_spec_ext.engine.drafting import step_drafts
from vllm_spec_ext.engine.starting.scratch import ScratchNeed
from vllm_spec_ext.engine.trees import attention as tree_attention
from vllm_spec_ext.engine.trees.plan import RequestRows, TreePlan, build_plan
from vllm_spec_ext.errors import SpecExtError

TREE = {"method": "oracle", "num_speculative_tokens": 12, "branches": 4}
TOLERANCE = 2e-4  # of a log-probability in float32: sums in another order, nothing else
ROOMY = 256  # outputs become prompts here
SCENARIO = Scenario([{"max_tokens": 60, "ignore_eos": True, "logprobs": 5}], PROMPTS)


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine(max_model_len=ROOMY)


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[list[list[int]]]:
    return tokens(run(plain, SCENARIO))


@pytest.fixture(scope="module")
def fresh(make_engine: Any) -> Callable[[Sequence[int]], list[dict[int, float]]]:
    """Log-probabilities after every token of a prompt, from one prefill without any cache."""
    engine = make_engine(
        max_model_len=ROOMY, enable_prefix_caching=False, max_num_batched_tokens=256
    )

    def prefill(prompt: Sequence[int]) -> list[dict[int, float]]:
        params = sampling_params({"max_tokens": 1, "prompt_logprobs": 8, "logprobs": 8})
        (out,) = engine.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        found = [*out.prompt_logprobs[1:], out.outputs[0].logprobs[0]]
        return [{token: entry.logprob for token, entry in place.items()} for place in found]

    return prefill


@pytest.fixture
def tree_engine(make_engine: Any) -> Iterator[Any]:
    engine = make_engine(max_model_len=ROOMY, speculative_config=TREE)
    engine.reset_prefix_cache()
    yield engine
    engine.reset_prefix_cache()


def truths(expected: list[list[list[int]]]) -> list[list[int]]:
    return [out[0] for out in expected]


def assert_close(found: Any, true: dict[int, float]) -> None:
    """The best tokens of one position agree with those of the fresh prefill."""
    for token, entry in found.items():
        if token in true:
            assert entry.logprob == pytest.approx(true[token], abs=TOLERANCE)
    assert sum(token in true for token in found) >= 4


class MovedBlocks:
    """Records the KV blocks into which accepted branches were moved, and those reused later."""

    def __init__(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved: set[int] = set()
        self.reused: set[int] = set()
        commit, prepare = runner.tree_attention.commit, runner._prepare_inputs
        copy = runner.tree_attention.copy_blocks
        committing: list[bool] = []

        def record_commit(walk: Any) -> None:
            committing.append(True)
            commit(walk)
            committing.clear()

        def record_copy(pairs: Sequence[tuple[int, int]], *placed: Any) -> None:
            if committing:
                self.moved.update(to for _, to in pairs)
            copy(pairs, *placed)

        def record_prepare(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            batch = runner.input_batch
            new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
            for row, request_id in enumerate(batch.req_ids):
                if request_id in new:
                    table = batch.block_table[0]
                    cached = int(batch.num_computed_tokens_cpu[row]) // table.block_size
                    self.reused.update(table.block_table.np[row, :cached].tolist())
            return prepare(scheduler_output, num_scheduled_tokens)

        monkeypatch.setattr(runner.tree_attention, "commit", record_commit)
        monkeypatch.setattr(runner.tree_attention, "copy_blocks", record_copy)
        monkeypatch.setattr(runner, "_prepare_inputs", record_prepare)


@pytest.mark.v1_runner
def test_logprobs_after_accepted_branches_equal_a_fresh_prefill(
    tree_engine: Any, expected: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First while generating, then in a second request that finds the moved KV in the cache."""
    record = MovedBlocks(runner_of(tree_engine), monkeypatch)
    outputs = run(tree_engine, SCENARIO, truths(expected))
    assert tokens(outputs) == expected
    assert len(record.moved) > 5
    whole = []
    for out in outputs:
        prompt, completion = list(out.prompt_token_ids), out.outputs[0]
        whole.append([*prompt, *completion.token_ids])
        places = fresh(whole[-1])
        assert len(places) == len(whole[-1])
        for i, found in enumerate(completion.logprobs):
            assert_close(found, places[len(prompt) - 1 + i])
    record.reused.clear()
    params = sampling_params({"max_tokens": 2, "logprobs": 5})
    again = tree_engine.generate(
        [{"prompt_token_ids": prompt} for prompt in whole], params, use_tqdm=False
    )
    for out, prompt in zip(again, whole, strict=True):
        assert out.num_cached_tokens > 0
        assert_close(out.outputs[0].logprobs[0], fresh(prompt)[-1])
    assert len(record.reused & record.moved) > 3


def no_commit(engine: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runner_of(engine).tree_attention, "commit", lambda walk: None)


def no_ancestor_writes(engine: Any, patch: pytest.MonkeyPatch) -> None:
    def own_rows(num_rows: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(num_rows, device=slots.device), slots[:num_rows]

    patch.setattr(runner_of(engine).tree_attention, "_all_written", own_rows)


def linear_positions(engine: Any, patch: pytest.MonkeyPatch) -> None:
    def change(plan: TreePlan, requests: Sequence[RequestRows]) -> None:
        for request in requests:
            for i, row in enumerate(plan.rows):
                if 0 <= row - request.first_row < request.num_tokens:
                    plan.positions[i] = request.num_computed + row - request.first_row

    _change_plan(patch, change)


def no_virtual_requests(engine: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tree_attention, "expand_attention", lambda common, plan: common)


def no_tail_copies(engine: Any, patch: pytest.MonkeyPatch) -> None:
    def change(plan: TreePlan, requests: Sequence[RequestRows]) -> None:
        plan.tail_copies = plan.tail_copies[:0]

    _change_plan(patch, change)


def _change_plan(
    patch: pytest.MonkeyPatch, change: Callable[[TreePlan, Sequence[RequestRows]], None]
) -> None:
    def build(requests: Sequence[RequestRows], *args: Any) -> TreePlan:
        plan = build_plan(requests, *args)
        change(plan, requests)
        return plan

    patch.setattr(tree_attention, "build_plan", build)


MUTATIONS = [no_commit, no_ancestor_writes, linear_positions, no_virtual_requests, no_tail_copies]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_identity_breaks_without(
    mutate: Any, tree_engine: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: otherwise the identity tests would prove nothing about this part."""
    with monkeypatch.context() as patch:
        mutate(tree_engine, patch)
        assert tokens(run(tree_engine, SCENARIO, truths(expected))) != expected
    tree_engine.reset_prefix_cache()
    assert tokens(run(tree_engine, SCENARIO, truths(expected))) == expected


@pytest.mark.parametrize("num_left", [0, 1, 3])
def test_few_scratch_blocks_make_trees_smaller(
    num_left: int, tree_engine: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = runner_of(tree_engine).tree_attention
    monkeypatch.setattr(attention, "scratch", attention.scratch[:num_left])
    assert tokens(run(tree_engine, SCENARIO, truths(expected))) == expected


def test_segments_without_scratch_are_ignored(
    tree_engine: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when trees that were kept for a later step meet: the plan itself must cope."""
    attention = runner_of(tree_engine).tree_attention
    monkeypatch.setattr(attention, "scratch", attention.scratch[:3])
    monkeypatch.setattr(step_drafts, "fitting_prefix", lambda parents, *args: (len(parents), 0))
    dropped: list[int] = []
    _change_plan(monkeypatch, lambda plan, requests: dropped.append(plan.num_dropped))
    assert tokens(run(tree_engine, SCENARIO, truths(expected))) == expected
    assert sum(dropped) > 50


@pytest.mark.parametrize("num_blocks", [0, 2])
def test_engine_with_few_scratch_blocks(
    num_blocks: int, make_engine: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ScratchNeed(num_blocks, num_blocks)
    monkeypatch.setattr(ScratchNeed, "of_drafts", lambda *args: few)
    engine = make_engine(
        speculative_config={**TREE, "wrong": 0.1 + num_blocks / 100}, max_model_len=ROOMY
    )
    attention = runner_of(engine).tree_attention
    assert (attention is None) == (num_blocks == 0)
    assert tokens(run(engine, SCENARIO, truths(expected))) == expected


def test_memory_that_scratch_blocks_use_up(
    make_engine: Any, tiny_model: Path, expected: Any
) -> None:
    """It is said how much is needed, and with that much a request of the full length runs."""

    def start(num_bytes: int) -> Any:
        config = {**TREE, "wrong": 0.15}
        sizes = {"max_model_len": ROOMY, "kv_cache_memory_bytes": num_bytes}
        return make_engine(speculative_config=config, **sizes)

    with pytest.raises(SpecExtError, match="beside what drafts need") as refused:
        start(800_000)
    found = re.search(r"expected at least (\d+)", str(refused.value))
    assert found is not None
    needed = int(found[1])
    with pytest.raises(SpecExtError, match=f"found {needed - 1} bytes, expected at least {needed}"):
        start(needed - 1)
    longest = Scenario([{"max_tokens": ROOMY, "ignore_eos": True}], PROMPTS[:1])
    (out,) = run(start(needed), longest, [expected[0][0]])
    assert len(out.prompt_token_ids) + len(out.outputs[0].token_ids) == ROOMY


def test_a_dummy_batch_writes_nothing(
    tree_engine: Any, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that runs where another replica works on, behind a step of this one that had a tree."""
    runner = runner_of(tree_engine)
    make, seen = runner.step_drafts.make, []

    def made(*given: Any) -> Any:
        drafts = make(*given)
        if any(tree is not None for tree in runner.spec_step.parents):
            before = {name: cache.clone() for name, cache in runner.kv_by_layer.items()}
            for count in (13, 40):  # as long as a draft and its root, and longer
                runner._dummy_run(count, uniform_decode=count == 13)
            seen.append(all(torch.equal(before[name], runner.kv_by_layer[name]) for name in before))
        return drafts

    monkeypatch.setattr(runner.step_drafts, "make", made)
    few = Scenario([{"max_tokens": 20, "ignore_eos": True}], PROMPTS[:2])
    run(tree_engine, few, truths(expected))
    assert len(seen) > 3
    assert all(seen)
