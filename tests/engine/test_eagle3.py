# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 checkpoints as draft models: right drafts, trees, and the right hidden states."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_reference import DenseHead
from generation import run, sampling_params, tokens
from recorded_drafts import Text, VllmDrafts, recorded_by_us, recorded_by_vllm
from save_drafts import save_draft
from save_eagle3 import save_eagle3, save_walker
from scenarios import PROMPTS, SCENARIOS, Scenario
from test_bad_input import start
from test_greedy_identity import runner_of
from tiny_engine import ARGUMENTS

from vllm_spec_ext.engine.models.eagle_model import EagleModel
from vllm_spec_ext.errors import SpecExtError, UnsupportedError

CLOSE = 1e-4  # logits as near to each other may change places with the order of a summation
LAYERS = (0, 1, 2)  # of the target: what vLLM takes where a checkpoint names none

# In public layouts: what config.json says, and which tensors there are.
KINDS: dict[str, dict[str, Any]] = {
    "public": {},
    "short": {"max_position_embeddings": 48},  # else as "public"; less than the engine's positions
    "layers": {"seed": 4, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1, 2]}},
    "two_states": {"seed": 8, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
    "embeddings": {"seed": 5, "embeddings": True, "norm_before_residual": True, "as_bin": True},
    "norm_before_residual": {"seed": 9, "norm_before_residual": True},
    "same_vocabulary": {
        "seed": 6,
        "draft_vocab_size": 512,
        "without": ("lm_head.weight",),
        "architectures": ["Eagle3LlamaForCausalLM"],
    },
    "final_state": {
        "seed": 7,
        "eagle_config": {"use_aux_hidden_state": False},
        "without": ("fc.weight",),
    },
    "narrow": {"seed": 10, "hidden_size": 64, "target_hidden_size": 128, "embeddings": True},
    "norm_before_fc": {"seed": 11, "norm_before_fc": True},
    "fc_norm": {"seed": 15, "fc_norm": True, "norm_output": True},
    "bias_and_layers": {"seed": 12, "attention_bias": True, "num_hidden_layers": 2},
    "qwen3": {"seed": 13, "model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]},
    "speculators": {
        "seed": 14,
        "speculators": True,
        "embeddings": True,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    },
}


@pytest.fixture(scope="module")
def heads(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("heads")
    found = {name: save_eagle3(tiny_model, folder / name, **kind) for name, kind in KINDS.items()}
    found["self"] = str(tiny_model)
    found["other"] = save_draft(tiny_model, folder / "other", num_hidden_layers=1)
    return found


def own_engine(make_engine: Any, *folders: str, **options: Any) -> Any:
    config = {"method": "model_paths", "models": list(folders), "num_speculative_tokens": 4}
    return make_engine(speculative_config=config | options)


def dense_head(tiny_model: Path, folder: str) -> DenseHead:
    return DenseHead(tiny_model, Path(folder), LAYERS)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("public", "fork"), ("public", "suffix"), *((kind, "chain") for kind in KINDS)],
)
def test_drafts_by_definition(
    kind: str,
    shape: str,
    make_engine: Any,
    heads: dict[str, str],
    tiny_model: Path,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dense computation of target and head gives the same chains, on a fork too."""
    number = {"chain": 4, "fork": 8, "suffix": 4}[shape]
    engine = own_engine(make_engine, heads[kind], shape=shape, num_speculative_tokens=number)
    ours = recorded_by_us(engine, monkeypatch)
    for name in ("mixed_lengths", "prefix_reused"):
        assert tokens(run(engine, SCENARIOS[name])) == expected[name]
    dense = dense_head(tiny_model, heads[kind])
    long = [text for text in ours if len(ours[text]) >= 4]
    assert len(long) > 200
    assert not wrong_drafts(dense, {text: ours[text] for text in long})
    assert len({token for text in long for token in ours[text]}) > 20  # no constant


def wrong_drafts(dense: DenseHead, drafts: dict[Text, list[int]], number: int = 4) -> set[Text]:
    """Texts behind which something else is drafted than the definition says."""
    wrong, num_close = set(), 0
    for text, draft in drafts.items():
        made, gap = dense.draft(text, min(number, len(draft)))
        num_close += gap < CLOSE
        if gap >= CLOSE and made != draft[:number]:
            wrong.add(text)
    assert num_close < max(3, len(drafts) // 50)
    return wrong


def vllms_engine(make_engine: Any, folder: str, padded: bool = True, **arguments: Any) -> Any:
    """vLLM's own method ``eagle3``, as it is by default."""
    config = {"method": "eagle3", "model": folder, "num_speculative_tokens": 4}
    if not padded:
        config["disable_padded_drafter_batch"] = True
    return make_engine(speculative_config=config, async_scheduling=False, **arguments)


# Room for all prompts of a batch in one step, and for all answers in the model's length.
ROOMY: dict[str, Any] = {"max_model_len": 288, "max_num_batched_tokens": 768}


@pytest.fixture(scope="module")
def vllms(make_engine: Any, heads: dict[str, str]) -> Callable[[str], VllmDrafts]:
    """Drafts of vLLM's method by kind of checkpoint, and where nothing cuts it short."""
    known: dict[str, VllmDrafts] = {}

    def drafts(kind: str) -> VllmDrafts:
        if kind not in known:
            engine = vllms_engine(make_engine, heads[kind], **ROOMY)
            with pytest.MonkeyPatch.context() as patch:
                known[kind] = recorded_by_vllm(engine, patch)
                for name in ("mixed_lengths", "prefix_reused"):
                    outputs = run(engine, SCENARIOS[name])
            assert sum(out.num_cached_tokens for out in outputs) > 100
        return known[kind]

    return drafts


@pytest.mark.v1_runner  # whose drafter of vLLM is watched
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("public", "fork"), ("public", "suffix"), *((kind, "chain") for kind in KINDS)],
)
def test_same_drafts_as_vllm(
    kind: str,
    shape: str,
    make_engine: Any,
    heads: dict[str, str],
    vllms: Callable[[str], VllmDrafts],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All tokens of all drafts: in mixed batches, after rejections, as batch mates finish, after
    prefix hits; on a fork too."""
    # vLLM drafts nothing where the head's file names fewer positions.
    theirs = vllms("public" if kind == "short" else kind)
    assert not theirs.cut_prompts
    assert not theirs.skipped
    number = {"chain": 4, "fork": 8, "suffix": 4}[shape]
    options: dict[str, Any] = {"shape": shape, "num_speculative_tokens": number}
    ours = drafts_of_ours(make_engine, heads[kind], monkeypatch, ROOMY, **options)
    both = [text for text, draft in ours.items() if len(draft) >= 4 and text in theirs.drafts]
    assert len(both) > 250
    assert len(theirs.behind_drafts.intersection(both)) > 200
    dense = dense_head(tiny_model, heads[kind])
    differ = [
        (len(text), ours[text], theirs.drafts[text])
        for text in both
        if ours[text][:4] != theirs.drafts[text] and dense.draft(text, 4)[1] >= CLOSE
    ]
    assert not differ, (len(differ), len(both), differ)


def drafts_of_ours(
    make_engine: Any,
    folder: str,
    patch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    **options: Any,
) -> dict[Text, list[int]]:
    config = {"method": "model_paths", "models": [folder], "num_speculative_tokens": 4}
    engine = make_engine(speculative_config=config | options, **arguments)
    ours = recorded_by_us(engine, patch)
    for name in ("mixed_lengths", "prefix_reused"):
        run(engine, SCENARIOS[name])
    return ours


def read_the_next_token_of_a_chunk(runner: Any, patch: pytest.MonkeyPatch) -> None:
    """``prepare_next_token_ids_padded`` lets the head read the prompt's last token instead."""
    prepare = runner.drafter.prepare_next_token_ids_padded

    def right(sampled: Any, requests: Any, batch: Any, discarded: Any) -> Any:
        lengths, number = batch.num_tokens_no_spec, batch.num_reqs
        ends = batch.num_computed_tokens_cpu[:number] + runner.num_scheduled_tokens.np[:number]
        batch.num_tokens_no_spec = lengths.copy()
        unfinished = discarded[:number].numpy()
        batch.num_tokens_no_spec[:number][unfinished] = ends[unfinished] + 1
        found = prepare(sampled, requests, batch, discarded)
        batch.num_tokens_no_spec = lengths
        return found

    patch.setattr(runner.drafter, "prepare_next_token_ids_padded", right)


def run_the_drafter_in_every_step(runner: Any, patch: pytest.MonkeyPatch) -> None:
    """``_input_fits_in_drafter`` leaves it out for all if one request is near its end."""
    patch.setattr(runner, "_input_fits_in_drafter", lambda metadata: True)


def keep_lengths_apart(runner: Any, patch: pytest.MonkeyPatch) -> None:
    """``prepare_inputs`` makes the lengths and their upper bound one tensor on CPUs, so that
    ``_update_positions_dependent_metadata`` adds one to it twice."""
    from vllm.v1.spec_decode import llm_base_proposer

    copy = llm_base_proposer.async_tensor_h2d
    patch.setattr(
        llm_base_proposer, "async_tensor_h2d", lambda *given, **named: copy(*given, **named).clone()
    )


@dataclass(frozen=True)
class Deviation:
    """Where vLLM 0.32 does not draft what an EAGLE-3 head is defined to draft."""

    mend: Callable[[Any, pytest.MonkeyPatch], None]  # what would have to be otherwise in vLLM
    where: Callable[[VllmDrafts, Text], bool]
    arguments: dict[str, Any]
    padded: bool = True
    num_right: int = 0  # first tokens of a draft that are right all the same


DEVIATIONS = {
    "chunks": Deviation(
        read_the_next_token_of_a_chunk,
        lambda theirs, text: theirs.leans_on(text, theirs.cut_prompts),
        {**ROOMY, "max_num_batched_tokens": 96},
    ),
    "near_the_end": Deviation(
        run_the_drafter_in_every_step,
        lambda theirs, text: theirs.leans_on(text, theirs.skipped),
        {**ROOMY, "max_model_len": 160},
    ),
    "lengths": Deviation(
        keep_lengths_apart,
        lambda theirs, text: text in theirs.behind_drafts,
        {**ROOMY, "max_num_batched_tokens": 96},
        padded=False,
        num_right=1,
    ),
}


@pytest.mark.v1_runner
@pytest.mark.parametrize("name", DEVIATIONS)
def test_where_vllm_deviates_from_the_definition(
    name: str,
    make_engine: Any,
    heads: dict[str, str],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There and nowhere else; with one function of vLLM mended nowhere. Ours are right there."""
    deviation, dense = DEVIATIONS[name], dense_head(tiny_model, heads["public"])
    engine = vllms_engine(make_engine, heads["public"], deviation.padded, **deviation.arguments)
    recorded = []
    for is_mended in (False, True):
        with monkeypatch.context() as patch:
            if is_mended:
                deviation.mend(runner_of(engine), patch)
            theirs = recorded_by_vllm(engine, patch)
            for scenario in ("mixed_lengths", "prefix_reused"):
                # Mended, the drafter goes beyond the model's length, which spoils the first block.
                assert engine.reset_prefix_cache()
                run(engine, SCENARIOS[scenario])
        recorded.append(theirs)
    as_it_is, mended = recorded
    ours = drafts_of_ours(make_engine, heads["public"], monkeypatch, deviation.arguments)
    # Near the model's end ours are shorter.
    both = [text for text in ours if text in as_it_is.drafts and len(ours[text]) == 4]
    wrong = wrong_drafts(dense, {text: as_it_is.drafts[text] for text in both})
    there = {text for text in both if deviation.where(as_it_is, text)}
    assert wrong <= there
    assert len(wrong) > 10, "vLLM has changed: say so in docs/eagle3.md"
    first = {text: as_it_is.drafts[text][: deviation.num_right] for text in both}
    assert not deviation.num_right or not wrong_drafts(dense, first, deviation.num_right)
    assert not wrong_drafts(dense, {text: ours[text] for text in both})
    again = [text for text in ours if text in mended.drafts and len(ours[text]) == 4]
    assert len(again) >= len(both)
    assert not wrong_drafts(dense, {text: mended.drafts[text] for text in again})


@pytest.mark.parametrize("shape", ["chain", "fork"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_same_tokens(
    scenario: str, shape: str, make_engine: Any, heads: dict[str, str], expected: dict[str, Any]
) -> None:
    number = {"chain": 4, "fork": 8}[shape]
    engine = own_engine(make_engine, heads["public"], shape=shape, num_speculative_tokens=number)
    assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario]


TREES: dict[str, dict[str, Any]] = {
    "small_model": {"method": "small_model", "model": "public", "num_speculative_tokens": 4},
    "dynamic": {"method": "token_tree", "models": ["public"], "num_speculative_tokens": 8},
    "expansion": {
        "method": "token_tree",
        "models": ["public"],
        "expansion": [2, 2, 1],
        "num_speculative_tokens": 10,
    },
    "two_heads": {
        "method": "token_tree",
        "models": ["public", "layers"],
        "expansion": [2, 1],
        "num_speculative_tokens": 8,
    },
    "beside_a_model": {
        "method": "token_tree",
        "models": ["final_state", "self", "embeddings"],
        "expansion": [2, 1, 1],
        "num_speculative_tokens": 18,
    },
}


@pytest.mark.parametrize("name", TREES)
def test_methods_take_a_checkpoint_as_a_model(
    name: str, make_engine: Any, heads: dict[str, str], expected: dict[str, Any]
) -> None:
    config = dict(TREES[name]) | {"adaptive_length": False}
    if "model" in config:
        config["model"] = heads[config["model"]]
    else:
        config["models"] = [heads[kind] for kind in config["models"]]
    engine = make_engine(speculative_config=config)
    hosted = runner_of(engine).drafter.models.models
    kinds = config.get("models", [config.get("model")])
    assert [isinstance(model, EagleModel) for model in hosted] == [
        folder != heads["self"] for folder in kinds
    ]
    for scenario in ("mixed_lengths", "prefix_reused", "max_model_len", "seeded", "json_schema"):
        assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario], scenario
    sampled = Scenario([{"max_tokens": 30, "temperature": 0.8}], PROMPTS)
    assert len(tokens(run(engine, sampled))) == len(PROMPTS)
    stats = engine.collective_rpc("spec_ext_stats")[0]
    assert len(stats["propose_us"]) > 50


@pytest.fixture(scope="module")
def walker(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_walker(tiny_model, tmp_path_factory.mktemp("walker"))


@pytest.mark.parametrize("blocks", [None, 16])
@pytest.mark.parametrize("shape", ["chain", "fork"])
def test_the_right_hidden_states_are_read(
    shape: str, blocks: int | None, make_engine: Any, walker: tuple[str, str]
) -> None:
    """Every first draft is accepted: of chains, from rows of a tree, after preemption and hits."""
    target, head = walker
    plain = make_engine(model=target)
    config = {
        "method": "model_paths",
        "models": [head],
        "num_speculative_tokens": 3,
        "depth": 1,
        "shape": shape,
    }
    more = {} if blocks is None else {"num_gpu_blocks_override": blocks}
    engine = make_engine(model=target, speculative_config=config, **more)
    drafter = runner_of(engine).drafter._proposer
    long = Scenario([{"max_tokens": 100, "ignore_eos": True}], PROMPTS)
    for scenario in (long, SCENARIOS["prefix_reused"], long):
        drafter.num_right = drafter.num_missed = 0
        assert tokens(run(engine, scenario)) == tokens(run(plain, scenario))
        assert drafter.num_missed == 0
        assert drafter.num_right > 20


def test_rows_of_rejected_tokens_would_be_noticed(
    make_engine: Any, walker: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: states of the first rows instead of the accepted ones."""
    from vllm_spec_ext.engine.step import Step

    target, head = walker
    config = {
        "method": "model_paths",
        "models": [head],
        "num_speculative_tokens": 3,
        "depth": 1,
        "shape": "fork",
    }
    engine = make_engine(model=target, speculative_config=config)
    drafter = runner_of(engine).drafter._proposer
    drafter.num_missed = 0
    from vllm_spec_ext.engine.models import batch_events

    rows = batch_events.state_rows

    def first_rows(step: Step, starts: Any, new_tokens: Any) -> Any:
        found = rows(step, starts, new_tokens)
        for first, one in zip(starts, found, strict=True):
            one[:] = range(first, first + len(one))
        return found

    monkeypatch.setattr(batch_events, "state_rows", first_rows)
    run(engine, Scenario([{"max_tokens": 50, "ignore_eos": True}], PROMPTS))
    assert drafter.num_missed > 50


def test_every_step_is_read_even_if_nothing_is_drafted(
    make_engine: Any, heads: dict[str, str], expected: dict[str, Any]
) -> None:
    """The target's states are gone with their step."""
    engine = own_engine(make_engine, heads["public"], skip=3)
    run(engine, SCENARIOS["mixed_lengths"])
    (model,) = runner_of(engine).drafter.models.models
    before = model.counts.rows
    outputs = run(engine, Scenario([{"max_tokens": 1}], ["no draft follows a single token"]))
    assert model.counts.rows == before + len(outputs[0].prompt_token_ids)


def test_head_shares_what_its_checkpoint_lacks(make_engine: Any, heads: dict[str, str]) -> None:
    for kind, shares_head, shares_embeddings in (
        ("public", False, True),
        ("embeddings", False, False),
        ("same_vocabulary", True, True),
    ):
        runner = runner_of(own_engine(make_engine, heads[kind]))
        (paged,) = runner.drafter.models.paged
        target = runner.get_model()
        assert (paged.module.lm_head is target.lm_head) == shares_head
        same = paged.module.model.embed_tokens is target.model.embed_tokens
        assert same == shares_embeddings


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"target_hidden_size": 64}, "states of size 64, expected the target's 128"),
    "map": ({"without": ("d2t",)}, "found no tensor d2t.*each of the 256 tokens"),
    "fc": ({"without": ("fc.weight",)}, "found no tensor fc.weight"),
    "fc_shape": (
        {"num_aux_hidden_states": 2},
        r"fc.weight of shape \[128, 384\], expected \[128, 256\]",
    ),
    "head": ({"without": ("lm_head.weight",)}, "found no tensor lm_head.weight"),
    "layers": (
        {"eagle_aux_hidden_state_layer_ids": [0, 2, 30]},
        r"found eagle_aux_hidden_state_layer_ids=\[0, 2, 30\], expected numbers from 0 to 3",
    ),
    "same_layers": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, "expected 3 different layers"),
    "parallel": (
        {"architectures": ["PeagleLlamaForCausalLM"]},
        "found architecture .*drafts one token after the other",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_checkpoints_that_cannot_work(name: str, tiny_model: Path, tmp_path: Path) -> None:
    changes, words = BAD[name]
    folder = save_eagle3(tiny_model, tmp_path / "head", **changes)
    with pytest.raises(SpecExtError, match=words):
        start(tiny_model, {"method": "small_model", "model": folder})


def test_targets_and_heads_that_do_not_fit(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import interfaces

    folder = save_eagle3(tiny_model, tmp_path / "head")
    config = {"method": "small_model", "model": folder}
    with monkeypatch.context() as patch:
        patch.setattr(interfaces, "supports_eagle3", lambda model: False)
        with pytest.raises(UnsupportedError, match=r"does not give the hidden states.*SupportsEag"):
            start(tiny_model, config)
    other = save_eagle3(
        tiny_model, tmp_path / "other", num_attention_heads=1, num_key_value_heads=1
    )
    with pytest.raises(UnsupportedError, match=r"found 1 attention heads.*tensor_parallel_size=2"):
        start(tiny_model, config | {"model": other}, tensor_parallel_size=2)
    old = tmp_path / "eagle1"
    save_draft(tiny_model, old, num_hidden_layers=1)
    from safetensors.torch import load_file, save_file

    tensors = load_file(old / "model.safetensors") | {"fc.weight": torch.ones(128, 256)}
    save_file(tensors, old / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"none of EAGLE-3 .*\[128, 256\]"):
        start(tiny_model, config | {"model": str(old)})


def test_sessions_second_turns_and_aborts_do_no_harm(
    make_engine: Any, heads: dict[str, str], plain: Any
) -> None:
    """Answers become prompts: their KV was made from accepted rows."""
    scenario = Scenario([{"max_tokens": 40, "ignore_eos": True}], PROMPTS)
    first = run(plain, scenario)
    turns = [
        {"prompt_token_ids": [*out.prompt_token_ids, *out.outputs[0].token_ids][:125]}
        for out in first
    ]
    params = sampling_params({"max_tokens": 30, "ignore_eos": True})
    want = tokens(plain.generate(turns, params, use_tqdm=False))
    engine = own_engine(make_engine, heads["public"], shape="fork", num_speculative_tokens=8)
    run(engine, scenario)
    outputs = engine.generate(turns, params, use_tqdm=False)
    assert tokens(outputs) == want
    assert sum(out.num_cached_tokens for out in outputs) > 300


def test_config_of_a_checkpoint_is_read(heads: dict[str, str]) -> None:
    from vllm_spec_ext.engine.models.eagle_checkpoint import is_eagle3, read_config
    from vllm_spec_ext.engine.models.weight_files import tensor_shapes

    for name, folder in heads.items():
        assert is_eagle3(read_config(folder), folder) == (name in KINDS), name
    assert is_eagle3({"speculators_model_type": "eagle3"}, "x")
    assert is_eagle3({"architectures": ["LlamaForCausalLM"]}, "AngelSlim/Qwen3-8B_eagle3")
    assert not is_eagle3({"architectures": ["LlamaForCausalLM"]}, "eagle3/llama")
    assert tensor_shapes(Path(heads["public"]))["fc.weight"] == (128, 384)
    assert tensor_shapes(Path(heads["embeddings"]))["d2t"] == (256,)
    assert json.loads((Path(heads["public"]) / "config.json").read_text())["draft_vocab_size"]


def test_a_target_that_hands_out_states_is_compiled_apart(
    tiny_model: Path, heads: dict[str, str]
) -> None:
    """Else its compiled graph would be taken from the cache of an engine that reads no states."""
    from vllm.engine.arg_utils import EngineArgs

    def compiled_as(**config: Any) -> str:
        args = EngineArgs(
            model=str(tiny_model),
            speculative_config={"num_speculative_tokens": 2, **config},
            **{**ARGUMENTS, "max_model_len": 96},
        )
        made: str = args.create_engine_config().compute_hash()
        return made

    reading = compiled_as(method="small_model", model=heads["public"])
    chains = compiled_as(method="input_copy")
    assert reading != chains
    assert chains == compiled_as(method="input_copy", max_ngram=3)
    assert reading == compiled_as(method="small_model", model=heads["public"])
