# SPDX-License-Identifier: Apache-2.0
"""`cache_view` on a real engine: the text is the target's own, whatever part of its cache it sees.

Identity cannot see wrong KV in a view, as wrong drafts are rejected. A view that hides nothing can:
the target accepts all of it. And page means are compared with the cache at every choice.
"""

from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generation import (
    count_preempted,
    run,
    run_with_aborts,
    same_tokens_twice,
    sampling_params,
    tokens,
)
from homogeneity import same_distribution_p_value
from sampling_distributions import DIFFERENT, SAME, samples_of
from scenarios import (
    LONG,
    LONG_PROMPT,
    LONG_PROMPT_SIZES,
    LONG_SIZES,
    PROMPTS,
    SCENARIOS,
    SEVERAL,
    Scenario,
)
from test_bad_input import start
from test_greedy_identity import runner_of
from test_streaming_input import Session
from tiny_engine import ARGUMENTS
from worker_counts import kept_counts

from vllm_spec_ext.engine.models.memory_check import block_bytes
from vllm_spec_ext.engine.views.known_pages import KnownPages
from vllm_spec_ext.engine.views.layer_tables import LayerTables
from vllm_spec_ext.engine.views.page_means import columns_of_keys
from vllm_spec_ext.engine.views.target_view import HostedView
from vllm_spec_ext.engine.views.view_binding import check_layers, depth_of
from vllm_spec_ext.engine.views.view_host import ViewHost
from vllm_spec_ext.engine.views.view_memory import ViewMemory
from vllm_spec_ext.errors import UnsupportedError
from vllm_spec_ext.proposers.base import StepOutcome
from vllm_spec_ext.proposers.cache_view import CacheView
from vllm_spec_ext.proposers.growth import drawing
from vllm_spec_ext.proposers.payoff.forward_payoff import Retries
from vllm_spec_ext.proposers.views import ViewSpec

FREE = ("batch_of_one", "mixed_lengths", "prefix_reused", "max_model_len", "several_samples")
"""Scenarios in which nothing but the model chooses tokens."""

VIEWS: dict[str, dict[str, Any]] = {
    "full": {"view": "full"},
    "stream": {"view": "stream", "budget": 64, "sink": 32},
    "retrieval": {"view": "retrieval", "budget": 64, "sink": 0, "recent": 32},
    "dense": {
        "view": "retrieval",
        "budget": 96,
        "sink": 32,
        "recent": 32,
        "refresh": 4,
        "dense_layers": [0],
    },
}


@pytest.fixture(scope="module")
def engines(make_engine: Any) -> Callable[..., Any]:
    def make(name: str, *, engine: dict[str, Any] | None = None, **options: Any) -> Any:
        config = {"method": "cache_view", "draft_on_cpu": True, "adaptive_length": False}
        config |= {"num_speculative_tokens": 4, **VIEWS[name], **options}
        return make_engine(speculative_config=config, **(engine or {}))

    return make


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[StepOutcome]:
    """What became of all drafts."""
    found: list[StepOutcome] = []
    observe = CacheView.observe

    def watched(self: CacheView, given: Any) -> None:
        found.extend(given)
        observe(self, given)

    monkeypatch.setattr(CacheView, "observe", watched)
    return found


class Means:
    """Compares the means that a choice is made by with what the cache holds."""

    def __init__(self) -> None:
        self.num_choices = self.num_stale = 0

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        choose = LayerTables.choose

        def watched(tables: Any, layer: str, queries: Any, table: Any) -> None:
            for part in tables._choosing if layer in tables._number else ():
                for pages, is_candidate in zip(part.pages, part.is_candidate, strict=True):
                    blocks = pages[is_candidate]
                    made = tables._means.of(layer, blocks)
                    self.num_choices += 1
                    self.num_stale += not torch.allclose(made, tables._means.read(layer, blocks))
            choose(tables, layer, queries, table)

        patch.setattr(LayerTables, "choose", watched)


@pytest.fixture
def means(monkeypatch: pytest.MonkeyPatch) -> Means:
    found = Means()
    found.watch(monkeypatch)
    return found


def shares(outcomes: list[StepOutcome]) -> tuple[int, int]:
    """Accepted and drafted tokens."""
    accepted = sum(outcome.num_accepted for outcome in outcomes)
    return accepted, sum(outcome.num_drafted for outcome in outcomes)


def test_the_target_accepts_all_that_a_full_view_drafts(
    engines: Any, expected: dict[str, Any], expected_long: Any, outcomes: list[StepOutcome]
) -> None:
    """In mixed batches, beside chunked prefill, after prefix hits, with `n` > 1."""
    for scenario in FREE:
        assert tokens(run(engines("full"), SCENARIOS[scenario])) == expected[scenario], scenario
        accepted, drafted = shares(outcomes)
        assert accepted == drafted > 20, scenario
        outcomes.clear()
    engine = engines("full", engine=LONG_SIZES)
    assert tokens(run(engine, LONG)) == expected_long
    accepted, drafted = shares(outcomes)
    assert accepted == drafted > 150


def test_layers_that_are_all_dense_hide_nothing(
    engines: Any, expected_long: Any, outcomes: list[StepOutcome]
) -> None:
    """Tables of the two kinds side by side in one pass."""
    engine = engines("stream", engine=LONG_SIZES, dense_layers=[0, 1, 2])
    assert tokens(run(engine, LONG)) == expected_long
    accepted, drafted = shares(outcomes)
    assert accepted == drafted > 150


@pytest.mark.parametrize("name", ["stream", "retrieval"])
def test_same_tokens(name: str, engines: Any, expected: dict[str, Any], means: Means) -> None:
    for scenario in SCENARIOS if name == "retrieval" else SEVERAL:
        assert tokens(run(engines(name), SCENARIOS[scenario])) == expected[scenario], scenario
    assert (means.num_choices > 0) == (name == "retrieval")
    assert means.num_stale == 0


@pytest.mark.parametrize("name", VIEWS)
def test_same_tokens_of_long_prompts(
    name: str, engines: Any, expected_long: Any, means: Means, outcomes: list[StepOutcome]
) -> None:
    """Twice: the second time prompts are found in the prefix cache."""
    engine = engines(name, engine=LONG_SIZES)
    same_tokens_twice(engine, expected_long)
    accepted, drafted = shares(outcomes)
    assert drafted > 300
    if name in ("retrieval", "dense"):
        assert means.num_choices > 50
        assert means.num_stale == 0
    if name != "full":
        assert accepted < drafted  # a view of a random model is far from the whole


CROWDED = Scenario([{"max_tokens": 100, "ignore_eos": True}], PROMPTS)


@pytest.mark.parametrize("name", VIEWS)
def test_preemption(
    name: str,
    engines: Any,
    plain: Any,
    means: Means,
    outcomes: list[StepOutcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = tokens(run(plain, CROWDED))
    engine = engines(name, engine={"num_gpu_blocks_override": 16})
    preempted = count_preempted(engine, monkeypatch)
    for _ in range(2):
        assert tokens(run(engine, CROWDED)) == want
    assert preempted
    assert means.num_stale == 0
    accepted, drafted = shares(outcomes)
    assert drafted > 500
    if name == "full":
        assert accepted == drafted


def no_invalidation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KnownPages, "allocate", lambda self, blocks: None)


def nothing_is_unknown(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KnownPages, "unknown", lambda self, blocks: blocks[:0].astype("int64"))


@pytest.mark.parametrize("mutate", [no_invalidation, nothing_is_unknown])
def test_stale_means_are_seen(
    mutate: Callable[[pytest.MonkeyPatch], None],
    engines: Any,
    plain: Any,
    means: Means,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative controls: output stays the same, and the means are not those of the cache."""
    want = tokens(run(plain, CROWDED))
    engine = engines("retrieval", engine={"num_gpu_blocks_override": 16})
    with monkeypatch.context() as patch:
        mutate(patch)
        for _ in range(2):
            assert tokens(run(engine, CROWDED)) == want
    assert means.num_stale > 0
    books = runner_of(engine).drafter.views.books
    books.known.clear()
    means.num_stale = 0
    assert tokens(run(engine, CROWDED)) == want
    assert means.num_stale == 0


@pytest.mark.parametrize("name", VIEWS)
def test_aborted_requests_leave_nothing_behind(
    name: str, engines: Any, expected_long: Any, means: Means
) -> None:
    engine = engines(name, engine=LONG_SIZES)
    engine.reset_prefix_cache()  # else they may have ended by then
    finished = run_with_aborts(engine, LONG, (0, 4), at_step=6)
    assert finished == {i: answer[0] for i, answer in enumerate(expected_long) if i not in (0, 4)}
    short = Scenario([{"max_tokens": 2}], PROMPTS[:1])
    run(engine, short)  # vLLM tells of ends in the next step
    run(engine, short)
    (view,) = runner_of(engine).drafter.views.views
    assert len(view._choices) == 0
    assert len(view._free_places) == LONG_SIZES["max_num_seqs"]
    assert not runner_of(engine).drafter._proposer._gate._pending
    assert means.num_stale == 0


def test_a_session_that_goes_on(engines: Any, means: Means, outcomes: list[StepOutcome]) -> None:
    """The last token is taken back, and a page gets other tokens."""
    for name in ("full", "retrieval"):
        session = Session(engines(name, engine=LONG_SIZES))
        session.turn(list(range(11, 100)))
        for first in (31, 51, 71):
            session.turn(list(range(first, first + 9)))
        session.end()
        if name == "full":
            accepted, drafted = shares(outcomes)
            assert accepted == drafted > 20
    assert means.num_choices > 10
    assert means.num_stale == 0


def test_second_turns(engines: Any, plain: Any, means: Means) -> None:
    """Answers become prompts: what was drafted and rejected is not in the prefix cache."""
    scenario = Scenario([{"max_tokens": 40, "ignore_eos": True}], PROMPTS)
    first = run(plain, scenario)
    turns = [
        {"prompt_token_ids": [*out.prompt_token_ids, *out.outputs[0].token_ids][:125]}
        for out in first
    ]
    params = sampling_params({"max_tokens": 30, "ignore_eos": True})
    want = tokens(plain.generate(turns, params, use_tqdm=False))
    for name in ("stream", "retrieval"):
        engine = engines(name)
        run(engine, scenario)
        outputs = engine.generate(turns, params, use_tqdm=False)
        assert tokens(outputs) == want
        assert sum(out.num_cached_tokens for out in outputs) > 300
    assert means.num_stale == 0


def test_drafts_are_shorter_without_spill_blocks(
    engines: Any, expected_long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("retrieval", engine=LONG_SIZES)
    books = runner_of(engine).drafter.views.books
    monkeypatch.setattr(books._spill, "_blocks", [])
    rooms: list[tuple[int, int]] = []
    begin = HostedView.begin

    def watched(self: Any, requests: Any, rows: Any) -> Any:
        made = begin(self, requests, rows)
        asked = [requests[row].room for row in made.rows]
        rooms.extend(zip(asked, made.rooms, strict=True))
        return made

    monkeypatch.setattr(HostedView, "begin", watched)
    assert tokens(run(engine, LONG)) == expected_long
    assert any(given < asked for asked, given in rooms)


def test_a_failed_pass_costs_a_draft(
    engines: Any, expected_long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("retrieval", engine=LONG_SIZES)
    monkeypatch.delenv("VLLM_SPEC_EXT_STRICT")
    paged, calls = runner_of(engine).drafter.views.paged, []
    run_view = paged.run_view

    def sometimes(index: int, plan: Any) -> Any:
        calls.append(index)
        if len(calls) % 5 == 0:
            raise RuntimeError("out of luck")
        return run_view(index, plan)

    monkeypatch.setattr(paged, "run_view", sometimes)
    assert tokens(run(engine, LONG)) == expected_long
    assert len(calls) > 50


def test_reviews_and_trees_over_two_views(
    make_engine: Any, expected_long: Any, means: Means
) -> None:
    """Passes of several tokens, some of which are taken back, while a tree was verified before."""
    engine = make_engine(speculative_config={"method": "view_reviews"}, **LONG_SIZES)
    assert tokens(run(engine, LONG)) == expected_long
    drafter = runner_of(engine).drafter._proposer
    whole = [outcome for outcome in drafter.outcomes if outcome.num_drafted == 4]
    assert len(whole) > 30
    assert {outcome.nodes for outcome in whole} == {(1, 2, 3)}
    assert means.num_choices > 50
    assert means.num_stale == 0


@pytest.mark.v1_runner
def test_keys_lie_where_they_are_read(engines: Any) -> None:
    """The layout of this platform's kernel, which no interface of vLLM tells."""
    runner = runner_of(engines("retrieval"))
    name, cache = next(iter(runner.kv_by_layer.items()))
    layer = runner.compilation_config.static_forward_context[name]
    own = torch.zeros_like(cache[:4])
    size = runner.input_batch.block_table[0].block_size
    key, value = torch.randn(2, 3 * size, cache.shape[1], cache.shape[3] // 2)
    order = torch.randperm(3 * size)
    layer.impl.do_kv_cache_update(layer, key, value, own, order + size)
    found = columns_of_keys(own, torch.tensor([1, 2, 3]))  # [3, heads, size, head_size]
    wanted = torch.empty_like(key)
    wanted[order] = key
    assert torch.equal(found.transpose(1, 2).flatten(0, 1), wanted)


def test_it_drafts_nothing_on_cpus_unless_told_to(
    make_engine: Any, expected: dict[str, Any]
) -> None:
    """Nothing is kept for views, either: no spill blocks, no means."""
    engine = make_engine(speculative_config={"method": "cache_view"})
    assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected["mixed_lengths"]
    assert not runner_of(engine).drafter.views


def test_same_tokens_where_clocks_decide(
    engines: Any, expected_long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try is always due, so that passes run where none would pay."""
    engine = engines("retrieval", engine=LONG_SIZES, adaptive_length=True)
    monkeypatch.setattr(Retries, "due", lambda self: True)
    for _ in range(3):
        assert tokens(run(engine, LONG)) == expected_long
    (view,) = runner_of(engine).drafter.views.views
    assert view.counts.forwards > 0


def test_passes_are_counted_for_the_front_end(
    engines: Any, expected_long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("stream", engine=LONG_SIZES)
    counted = kept_counts(runner_of(engine), monkeypatch)
    run(engine, LONG)
    ((forwards, rows, seconds),) = counted()["models"].values()
    assert rows >= forwards > 20
    assert seconds > 0


# -- sampling -------------------------------------------------------------------------------------

DRAWN = {"temperature": 1.3, "top_k": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def sample(make_engine: Any) -> Callable[..., list[Hashable]]:
    """Samples of the first tokens by an engine over such a view, or "plain"."""

    def draw(name: str, **options: Any) -> list[Hashable]:
        own = {"method": "cache_view", "draft_on_cpu": True, "adaptive_length": False}
        own |= {"num_speculative_tokens": 3, **VIEWS.get(name, {}), **options}
        config = None if name == "plain" else own
        return samples_of(make_engine, DRAWN, config, LONG_PROMPT, **LONG_PROMPT_SIZES)

    return draw


@pytest.fixture(scope="module")
def plain_sample(sample: Any) -> Iterator[list[Hashable]]:
    return sample("plain")


@pytest.mark.parametrize(
    ("name", "options"),
    [("stream", {}), ("retrieval", {}), ("retrieval", {"draw": False}), ("full", {})],
)
def test_samples_keep_the_targets_distribution(
    name: str,
    options: dict[str, Any],
    sample: Any,
    plain_sample: list[Hashable],
    outcomes: list[StepOutcome],
) -> None:
    found = sample(name, **options)
    accepted, drafted = shares(outcomes)
    if name == "full":
        assert accepted == drafted
    else:
        assert 2000 <= accepted < 0.8 * drafted  # far from the target, and yet used
    assert same_distribution_p_value(plain_sample, found) > SAME


def test_draws_with_another_distribution_are_found_out(
    sample: Any, plain_sample: list[Hashable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: the likeliest token with the probabilities of a draw."""
    monkeypatch.setattr(
        drawing, "draw", lambda probs, numbers: probs.argmax(-1, keepdim=True).int().numpy()
    )
    assert same_distribution_p_value(plain_sample, sample("stream")) < DIFFERENT


# -- what is refused ------------------------------------------------------------------------------

METHOD = {"method": "cache_view", "draft_on_cpu": True}


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        ({}, {"enable_lora": True}, "LoRA: found --enable-lora, expected none"),
        ({}, {"kv_cache_dtype": "fp8"}, "a quantized KV cache: found fp8"),
        ({"dense_layers": [1, 7]}, {}, r"dense_layers: found \[7\], expected numbers from 0 to 2"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(
    options: dict[str, Any], arguments: dict[str, Any], words: str, tiny_model: Path
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        start(tiny_model, {**METHOD, **options}, **arguments)


def test_other_layouts_of_a_cpu_s_cache(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import cpu_attn

    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *args: "amx")
    with pytest.raises(UnsupportedError, match=r"found KV in the layout of .amx.*--dtype float32"):
        start(tiny_model, METHOD)


def test_layers_that_the_front_end_cannot_see(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(engines("stream"))
    (group,) = (group for groups in runner.attn_groups for group in groups)
    check_layers(runner, runner.kv_by_layer)
    for words, change in {
        "found 2 KV groups, expected one": (runner, "attn_groups", [[group], [group]]),
        "the attention kernel splits KV blocks": (group, "kernel_block_size", 16),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            with pytest.raises(UnsupportedError, match=words):
                check_layers(runner, runner.kv_by_layer)
    with pytest.raises(UnsupportedError, match="has no KV cache of its own"):
        check_layers(runner, {})
    impl = runner.compilation_config.static_forward_context[group.layer_names[0]].impl
    monkeypatch.setattr(impl, "alibi_slopes", torch.ones(2))
    with pytest.raises(UnsupportedError, match="has ALiBi"):
        check_layers(runner, runner.kv_by_layer)


def test_layers_are_in_the_order_of_the_model() -> None:
    names = [f"model.layers.{number}.self_attn.attn" for number in (10, 2, 0, 1)]
    assert [depth_of(name) for name in sorted(names, key=depth_of)] == [(0,), (1,), (2,), (10,)]
    assert depth_of("decoder.h2o.block.3.attn") == (3,)


def test_means_have_their_part_of_the_memory() -> None:
    """By arithmetic."""
    chooses, streams = ViewHost([ViewSpec("a")]), ViewHost([ViewSpec("b", "stream")])
    chooses._cache_config = SimpleNamespace(block_size=16)
    assert chooses.without_means(33_000) == 32_000
    assert streams.without_means(33_000) == 33_000


@pytest.mark.parametrize(("name", "share_of_layers"), [("retrieval", 1.0), ("dense", 2 / 3)])
def test_memory_of_a_token_is_what_arithmetic_says(
    name: str, share_of_layers: float, engines: Any
) -> None:
    """As allocated: KV and means together fill what the engine was given, and not more."""
    given = ARGUMENTS["kv_cache_memory_bytes"]
    engine = engines(name)
    memory = ViewMemory.of(runner_of(engine).drafter.views.paged)
    config = engine.llm_engine.vllm_config
    kv_of_token = block_bytes(config.model_config, config.parallel_config, 1)
    assert memory.kv_of_token == kv_of_token
    assert memory.means_of_token == pytest.approx(share_of_layers * kv_of_token / (2 * 32))
    assert given - 2 * 32 * kv_of_token < memory.kv * (1 + 1 / 64) <= given
    (view,) = runner_of(engine).drafter.views.views
    num_layers = round(3 * share_of_layers)
    assert memory.choices == 8 * view.budget.num_chosen * num_layers * ARGUMENTS["max_num_seqs"]
    streams = ViewMemory.of(runner_of(engines("stream")).drafter.views.paged)
    assert streams.means == streams.choices == 0
    assert streams.num_tokens > memory.num_tokens
