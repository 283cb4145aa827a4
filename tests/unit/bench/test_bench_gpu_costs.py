# SPDX-License-Identifier: Apache-2.0
"""Sizes of models and seconds of passes; levels as a command line writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_spec_ext.bench import draft_levels, gpu_costs, model_shape
from vllm_spec_ext.bench.draft_levels import Level
from vllm_spec_ext.errors import SpecExtError


@pytest.mark.parametrize(
    ("name", "parameters", "kv_kib"),
    [
        ("llama2-7b", 6.738e9, 512),
        ("llama2-13b", 13.016e9, 800),
        ("llama3-8b", 8.030e9, 128),
        ("llama3-70b", 70.554e9, 320),
        ("llama3.2-1b", 1.236e9, 32),
        ("qwen2.5-7b", 7.616e9, 56),
        ("qwen2.5-0.5b", 0.494e9, 12),
        ("llama-68m", 0.068e9, 6),
    ],
)
def test_known_models_weigh_what_they_do(name: str, parameters: float, kv_kib: float) -> None:
    found = model_shape.find(name)
    assert found.memory_bytes / 2 == pytest.approx(parameters, rel=2e-3)
    assert found.kv_bytes == kv_kib * 1024
    assert found.read_bytes <= found.memory_bytes


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {**model_shape.KNOWN["llama3-8b"], **changes}
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine")
    found = model_shape.find(str(folder))
    assert found.name == "mine"
    assert found == model_shape.find(str(folder / "config.json"))
    assert found.read_bytes == model_shape.find("llama3-8b").read_bytes
    wide = model_shape.find(str(write(tmp_path / "wide", head_dim=256)))
    assert wide.kv_bytes == 2 * found.kv_bytes
    full = model_shape.find(str(write(tmp_path / "full", num_key_value_heads=None)))
    assert full.kv_bytes == 4 * found.kv_bytes
    assert full.attention_flops == found.attention_flops
    small = found.in_bits(weights=4, kv=8)
    assert (small.read_bytes, small.kv_bytes) == (found.read_bytes / 4, found.kv_bytes / 2)
    assert small.row_flops == found.row_flops


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 8}, "has num_local_experts; expected a plain decoder"),
        ({"kv_lora_rank": 512}, "has kv_lora_rank"),
        ({"sliding_window": 4096}, "has sliding_window"),
        ({"hidden_size": None}, "hidden_size is None in its config.json"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
    ],
)
def test_models_that_are_not_guessed(changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecExtError, match=message):
        model_shape.find(str(write(tmp_path / "x", **changes)))
    assert model_shape.find(
        str(write(tmp_path / "y", sliding_window=4096, use_sliding_window=False))
    )


def test_figures_by_hand_and_wrong_ones(tmp_path: Path) -> None:
    found = model_shape.find("weights=13.2e9, kv=524288, layers=32")
    listed = model_shape.find("llama2-7b")
    assert found.read_bytes == pytest.approx(listed.read_bytes, rel=0.01)
    assert found.row_flops == pytest.approx(listed.row_flops, rel=0.01)
    assert found.attention_flops == listed.attention_flops
    for wrong in ("weights=1,kv=2", "weights=x,kv=2,layers=3", "weights=-1,kv=1,layers=1", "a=b"):
        with pytest.raises(SpecExtError, match="expected weights=BYTES"):
            model_shape.find(wrong)
    with pytest.raises(SpecExtError, match="Did you mean 'llama2-7b'"):
        model_shape.find("lama2-7b")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SpecExtError, match="holds no object"):
        model_shape.find(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecExtError, match="cannot read"):
        model_shape.find(str(tmp_path))


def test_a_pass_waits_for_memory_or_for_operations() -> None:
    gpu = gpu_costs.find("h100,bandwidth=1e12,bandwidth_share=1,layer_us=0,forward_us=0")
    model = model_shape.find("weights=10e9,kv=100000,layers=10")
    assert gpu.forward_s(model, 1, 1, 0) == pytest.approx(0.01)
    assert gpu.forward_s(model, 8, 8, 10_000) == pytest.approx(0.018)
    # 10e9 operations a row at 494.75e12 a second.
    assert gpu.forward_s(model, 4096, 1, 0) == pytest.approx(4096 * 10e9 / 494.75e12)
    assert gpu.reading_s(2e12) == 2.0


def test_launches_add_up_in_graphs_and_run_beside_the_gpu_without() -> None:
    gpu = gpu_costs.find("h100,bandwidth=1e12,bandwidth_share=1")
    model = model_shape.find("weights=1e9,kv=100000,layers=20")
    assert gpu.forward_s(model, 1, 1, 0) == pytest.approx(0.001 + 20 * 10e-6 + 200e-6)
    eager = gpu.eager()
    assert eager.forward_s(model, 1, 1, 0) == pytest.approx(20 * 300e-6 + 200e-6)
    assert eager.forward_s(model, 1, 1, 1e5) == gpu.forward_s(model, 1, 1, 1e5)
    assert gpu_costs.find("h100,eager_layer_us=100").eager().eager_layer_us == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10", "unknown GPU: 'h10'"),
        ("h100,speed=1", "unknown figure of a GPU: 'speed'"),
        ("h100,bandwidth=0", "expected bandwidth=NUMBER"),
        ("h100,bandwidth=fast", "expected bandwidth=NUMBER"),
    ],
)
def test_wrong_gpus(text: str, message: str) -> None:
    with pytest.raises(SpecExtError, match=message):
        gpu_costs.find(text)


def test_levels() -> None:
    found = draft_levels.parse(
        "a: view, budget=512, accept=.9, page=0, tokens=5; model=llama-68m,accept=0.5,tokens=2 | "
        "lookup,accept=0.2"
    )
    assert found.name == "a"
    (view, small), (tail,) = found.parts
    assert view == Level("view", 0.9, 5, budget=512)
    assert small == Level("model", 0.5, 2, shape=model_shape.find("llama-68m"))
    assert tail == Level("lookup", 0.2, us=50.0)
    assert found.levels == [view, small, tail]


def test_levels_take_more_than_the_defaults() -> None:
    found = draft_levels.parse("model,accept=1,weights=1e9,kv=1000,layers=4,budget=7")
    assert found.name.startswith("model,")
    assert found.levels[0].shape == model_shape.find("weights=1e9,kv=1000,layers=4")
    assert draft_levels.parse("view,budget=512,accept=0.9").levels[0].page == 16
    assert [draft_levels.parse(text).name for text in draft_levels.EXAMPLES] == [
        "view",
        "view over lookup",
        "TriForce",
        "draft model",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: views,accept=1", "unknown level of 'x: views,accept=1'.*Did you mean 'view'"),
        ("view,budget=8,accept=0.5,us=3", "unknown option of the level 'view'"),
        ("view,budget=8", "lacks accept=RATE"),
        ("view,accept=0.5", "lacks budget=TOKENS"),
        ("view,budget=8,accept=1.5", "accept is '1.5', expected 0 to 1"),
        ("view,budget=8,accept=nan", "accept is 'nan', expected 0 to 1"),
        ("view,budget=8.5,accept=1", "budget is '8.5', expected a whole number"),
        ("view,budget=0,accept=1", "budget is '0', expected a whole number"),
        ("view=x,budget=8,accept=1", "view takes no value"),
        ("model,accept=1", "expected model=NAME, or model,weights=BYTES"),
        ("model=llama-68m,accept=1,layers=2", "expected model=NAME, or model,weights=BYTES"),
        ("lookup,accept=1; view,budget=8,accept=1", "a lookup reviews nothing"),
        (
            "model=llama-68m,accept=1 | lookup,accept=1",
            "expected tokens=NUMBER in the level before",
        ),
        ("", "unknown level"),
    ],
)
def test_wrong_levels(text: str, message: str) -> None:
    with pytest.raises(SpecExtError, match=message):
        draft_levels.parse(text)
