# SPDX-License-Identifier: Apache-2.0
"""Draft models in the engine: a target that is its own draft model accepts everything.

Identity with plain decoding cannot see stale draft KV, as wrong drafts are rejected; this can. The
float32 model of the folder has gaps between its logits that no order of summation closes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import count_preempted, run, run_with_aborts, sampling_params, tokens
from save_drafts import save_draft
from scenarios import PROMPTS, SCENARIOS, Scenario
from test_greedy_identity import runner_of
from test_streaming_input import Session

from vllm_spec_ext.engine import packed_projection
from vllm_spec_ext.engine.drafting.draft_budget import UNLIMITED
from vllm_spec_ext.engine.models.filled_blocks import FilledBlocks
from vllm_spec_ext.engine.models.hosted_model import HostedModel

FREE = ("batch_of_one", "mixed_lengths", "prefix_reused", "max_model_len", "several_samples")
"""Scenarios in which nothing but the model chooses tokens."""

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 4},
    "skipping": {"num_speculative_tokens": 4, "skip": 3},
    "suffix": {"num_speculative_tokens": 5, "shape": "suffix"},
    "fork": {"num_speculative_tokens": 8, "shape": "fork"},
}


@pytest.fixture(scope="module")
def drafts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "self": str(tiny_model),
        "other": save_draft(tiny_model, folder / "other", num_hidden_layers=1),
        "kv_heads": save_draft(tiny_model, folder / "kv_heads", num_key_value_heads=4),
        "few_heads": save_draft(
            tiny_model,
            folder / "few_heads",
            num_attention_heads=2,
            num_key_value_heads=1,
            hidden_size=64,
        ),
        "fewer_ids": save_draft(tiny_model, folder / "fewer_ids", vocab_size=384),
        "more_ids": save_draft(tiny_model, folder / "more_ids", vocab_size=640),
        "short": save_draft(tiny_model, folder / "short", max_position_embeddings=100),
    }


@pytest.fixture
def with_models(make_engine: Any, drafts: dict[str, str]) -> Callable[..., Any]:
    def make(names: str, engine: dict[str, Any] | None = None, **options: Any) -> Any:
        config = {"method": "model_paths", "models": [drafts[name] for name in names.split()]}
        return make_engine(speculative_config=config | options, **(engine or {}))

    return make


def drafter_of(engine: Any) -> Any:
    """The test proposer, with its counts at zero."""
    drafter = runner_of(engine).drafter._proposer
    drafter.num_right = drafter.num_missed = drafter.num_dead = 0
    drafter.outcomes.clear()
    return drafter


@pytest.mark.parametrize("name", SHAPES)
def test_the_target_accepts_all_of_itself(
    name: str, with_models: Any, expected: dict[str, Any]
) -> None:
    """In mixed batches, beside chunked prefill, after prefix hits, with `n` > 1."""
    engine = with_models("self", **SHAPES[name])
    for scenario in FREE:
        drafter = drafter_of(engine)
        assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario], scenario
        assert drafter.num_missed == 0, scenario
        assert drafter.num_right >= 15, scenario
        assert drafter.num_dead == 0, scenario


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in FREE])
def test_same_tokens_where_others_choose_too(
    scenario: str, name: str, with_models: Any, expected: dict[str, Any]
) -> None:
    engine = with_models("self", **SHAPES[name])
    assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario]


@pytest.mark.parametrize("name", ["chain", "skipping", "fork"])
def test_second_turns(name: str, with_models: Any, plain: Any) -> None:
    """Answers become prompts: what was drafted and accepted is found in the prefix cache."""
    scenario = Scenario([{"max_tokens": 40, "ignore_eos": True}], PROMPTS)
    first = run(plain, scenario)
    turns = [
        {"prompt_token_ids": [*out.prompt_token_ids, *out.outputs[0].token_ids][:125]}
        for out in first
    ]
    params = sampling_params({"max_tokens": 30, "ignore_eos": True})
    want = tokens(plain.generate(turns, params, use_tqdm=False))
    engine = with_models("self", **SHAPES[name])
    run(engine, scenario)
    drafter = drafter_of(engine)
    outputs = engine.generate(turns, params, use_tqdm=False)
    assert tokens(outputs) == want
    assert sum(out.num_cached_tokens for out in outputs) > 300
    assert drafter.num_missed == 0
    assert drafter.num_right > 100


@pytest.mark.parametrize("name", ["chain", "skipping", "fork"])
def test_preemption(
    name: str, with_models: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario([{"max_tokens": 100, "ignore_eos": True}], PROMPTS)
    want = tokens(run(plain, scenario))
    engine = with_models("self", {"num_gpu_blocks_override": 16}, **SHAPES[name])
    preempted = count_preempted(engine, monkeypatch)
    drafter = drafter_of(engine)
    assert tokens(run(engine, scenario)) == want
    assert preempted
    assert drafter.num_missed == 0
    assert drafter.num_right > 200


def test_aborted_requests_leave_nothing_behind(with_models: Any, expected: dict[str, Any]) -> None:
    engine = with_models("self", **SHAPES["fork"])
    drafter = drafter_of(engine)
    finished = run_with_aborts(engine, SCENARIOS["mixed_lengths"], (4, 7), at_step=3)
    answers = {i: answer[0] for i, answer in enumerate(expected["mixed_lengths"])}
    assert finished == {i: answers[i] for i in answers if i not in (4, 7)}
    assert drafter.num_missed == 0
    assert drafter.num_right > 50
    run(engine, SCENARIOS["batch_of_one"])
    (model,) = runner_of(engine).drafter.models.models
    assert len(model._known) <= 1  # the request of a step is freed at the start of the next one


def test_a_session_that_goes_on(with_models: Any) -> None:
    """The last token is taken back, in a block that the draft model has read to its end."""
    engine = with_models("self", **SHAPES["chain"])
    session = Session(engine)
    drafter = drafter_of(engine)
    session.turn([11, 12, 13, 14, 15, 16, 17, 18])
    for first in (31, 51, 71):
        session.turn(list(range(first, first + 9)))
    session.end()
    assert drafter.num_missed == 0
    assert drafter.num_right > 40


@pytest.mark.parametrize(
    "names", ["other self", "self other", "kv_heads self", "few_heads kv_heads self"]
)
def test_several_models(names: str, with_models: Any, expected: dict[str, Any]) -> None:
    """Of different shapes, one of which is right; each has KV of its own."""
    engine = with_models(names, num_speculative_tokens=12)
    for scenario in ("mixed_lengths", "prefix_reused"):
        drafter = drafter_of(engine)
        assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario]
        assert drafter.num_right > 60
        if names.endswith("self"):
            assert drafter.num_missed == 0
        else:
            assert sum(outcome.num_accepted for outcome in drafter.outcomes) > 100


@pytest.mark.parametrize("names", ["fewer_ids", "more_ids", "short", "kv_heads"])
def test_same_tokens_with_models_of_other_sizes(
    names: str, with_models: Any, expected: dict[str, Any]
) -> None:
    engine = with_models(names, num_speculative_tokens=4)
    drafter = drafter_of(engine)
    for scenario in ("mixed_lengths", "max_model_len", "seeded", "penalties", "json_schema"):
        assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario], scenario
    assert sum(outcome.num_drafted for outcome in drafter.outcomes) > 500


def test_without_scratch_blocks_branches_die_and_requests_live(
    with_models: Any, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_models("self", **SHAPES["fork"])
    (model,) = runner_of(engine).drafter.models.models
    monkeypatch.setattr(model.scratch, "_blocks", model.scratch._blocks[:3])
    drafter = drafter_of(engine)
    assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected["mixed_lengths"]
    assert drafter.num_dead > 0
    assert drafter.num_missed == 0


@pytest.mark.parametrize("rounded", [False, True])
def test_other_weights_while_it_runs(
    rounded: bool,
    with_models: Any,
    expected: dict[str, Any],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Online distillation: noise loses every draft, the old weights bring them back; also where the
    vocabulary projection is made in bfloat16, which loses next to none by itself."""
    from safetensors.torch import load_file

    engine = with_models("self", num_speculative_tokens=3)
    (model,), (paged,) = (getattr(runner_of(engine).drafter.models, n) for n in ("models", "paged"))
    weights = load_file(tiny_model / "model.safetensors")
    if rounded:
        monkeypatch.setattr(packed_projection, "_LARGE", 0)
        monkeypatch.setattr(packed_projection, "_multiplies_bfloat16", lambda: True)
    shares = []
    for scale in (0.0, 1.0, 0.0):
        mixed = {
            name: tensor + scale * torch.randn_like(tensor) for name, tensor in weights.items()
        }
        model.reload(mixed.items())
        assert (paged._project == paged.module.compute_logits) != rounded
        states = torch.randn(4, paged.module.config.hidden_size)
        found = paged._project(states)
        torch.testing.assert_close(found, paged.module.compute_logits(states), atol=0.3, rtol=0.05)
        drafter = drafter_of(engine)
        assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected["mixed_lengths"]
        shares.append(drafter.num_missed / drafter.num_right)
    monkeypatch.undo()
    model.reload(weights.items())  # as it was, for other tests
    assert shares[0] == shares[2]
    assert shares[0] <= 0.05 * rounded
    assert shares[1] > 0.9


def test_a_fresh_proposer_keeps_the_models(with_models: Any, expected: dict[str, Any]) -> None:
    engine = with_models("self", **SHAPES["chain"])
    before = runner_of(engine).drafter.models.paged[0].module
    engine.collective_rpc("spec_ext_reset")
    drafter = drafter_of(engine)
    assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected["mixed_lengths"]
    assert drafter.num_missed == 0
    assert runner_of(engine).drafter.models.paged[0].module is before


def no_forgetting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostedModel, "forget", lambda self, ids: None)


def no_invalidation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FilledBlocks, "allocate", lambda self, blocks: None)
    patch.setattr(FilledBlocks, "enter", lambda self, blocks, num_computed: None)


@pytest.mark.parametrize("mutate", [no_forgetting, no_invalidation])
def test_the_oracle_sees_stale_kv(
    mutate: Callable[[pytest.MonkeyPatch], None],
    with_models: Any,
    plain: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative controls: output stays the same, and acceptance falls."""
    scenario = Scenario([{"max_tokens": 100, "ignore_eos": True}], PROMPTS)
    want = tokens(run(plain, scenario))
    engine = with_models("self", {"num_gpu_blocks_override": 16}, **SHAPES["chain"])
    missed = 0
    with monkeypatch.context() as patch:
        mutate(patch)
        for _ in range(2):
            drafter = drafter_of(engine)
            assert tokens(run(engine, scenario)) == want
            missed += drafter.num_missed
    assert missed > 0
    (model,) = runner_of(engine).drafter.models.models
    model.blocks.clear()
    model._known.clear()
    drafter = drafter_of(engine)
    assert tokens(run(engine, scenario)) == want
    assert drafter.num_missed == 0


def test_passes_are_counted_and_timed(with_models: Any) -> None:
    engine = with_models("self", **SHAPES["chain"])
    run(engine, SCENARIOS["mixed_lengths"])
    (model,) = runner_of(engine).drafter.models.models
    assert model.counts.rows >= model.counts.forwards > 50
    assert model.counts.seconds > 0
    one, many = model.forward_seconds(1), model.forward_seconds(64)
    assert one is not None
    assert many is not None
    assert 0 < one <= many
    json.dumps([one, many])  # plain floats


def test_prompts_are_not_read_along_while_drafts_are_held_back(
    make_engine: Any, tiny_model: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding is the floor, for prompts as well; a model catches up once it drafts again."""
    config = {"method": "small_model", "model": str(tiny_model), "num_speculative_tokens": 4}
    engine = make_engine(speculative_config={**config, "adaptive_length": False})
    runner = runner_of(engine)
    scenario = Scenario([{"max_tokens": 4, "ignore_eos": True}], PROMPTS)
    want = tokens(run(plain, scenario))
    assert tokens(run(engine, scenario)) == want
    counts = runner.drafter.models.models[0].counts
    assert counts.rows

    def nothing(requests: Any) -> Any:
        for request in requests:
            request.room = 0
        return UNLIMITED

    with monkeypatch.context() as patch:
        patch.setattr(runner.step_drafts, "_within_budget", nothing)
        assert tokens(run(engine, scenario)) == want
        engine.reset_prefix_cache()
        before = counts.rows
        assert tokens(run(engine, scenario)) == want
        assert counts.rows == before
    assert tokens(run(engine, scenario)) == want
    assert counts.rows > before


def test_no_memory_for_what_is_read_along_costs_drafts_alone(
    with_models: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_models("self", **SHAPES["chain"])
    long: Any = [{"prompt_token_ids": list(range(3, 133))}]  # read in two steps
    scenario = Scenario([{"max_tokens": 12, "ignore_eos": True}], long)
    want = tokens(run(plain, scenario))
    assert tokens(run(engine, scenario)) == want
    engine.reset_prefix_cache()
    monkeypatch.setenv("VLLM_SPEC_EXT_STRICT", "0")
    model = runner_of(engine).drafter.models.models[0]
    prompt_parts = model._prompt_parts
    failed: list[bool] = []

    def fail(left: int) -> Any:
        if not failed and left == model._max_rows and model._unread:
            failed.append(True)
            raise torch.OutOfMemoryError("no memory")
        return prompt_parts(left)

    monkeypatch.setattr(model, "_prompt_parts", fail)
    assert tokens(run(engine, scenario)) == want
    assert failed
    assert not model._rows
    drafter = drafter_of(engine)
    assert tokens(run(engine, scenario)) == want
    assert drafter.num_right
