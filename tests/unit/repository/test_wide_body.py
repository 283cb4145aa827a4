# SPDX-License-Identifier: Apache-2.0
"""A small model in a large body says what it said."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import wide_body

SIZES = ["--intermediate", "160", "--layers", "4", "--groups", "2", "--dtype", "float32"]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=0.01,  # large, so that it counts
        tie_word_embeddings=request.param,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def widened(small: Path, *arguments: str) -> Path:
    out = small.parent / "wide"
    given = wide_body.parser().parse_args([str(small), str(out), *SIZES, *arguments])
    assert wide_body.write_wide(small, out, given) > 100_000
    return out


def logits_of(folder: Path) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(40).reshape(2, 20)).logits
    return result


def test_the_same_logits_from_more_weights(small: Path) -> None:
    wide = widened(small, "--hidden", "96")
    config = json.loads((wide / "config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"], config["head_dim"]) == (96, 12, 8)
    torch.testing.assert_close(logits_of(wide), logits_of(small), rtol=1e-3, atol=1e-3)


def test_a_weight_out_of_place_would_show(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_body.math, "sqrt", lambda ratio: ratio)
    wide = widened(small, "--hidden", "96")
    assert (logits_of(wide) - logits_of(small)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "24"], "--hidden: found 24, at least 48"),
        (["--hidden", "97"], "a multiple of the heads"),
        (["--hidden", "96", "--layers", "2"], "--layers: found 2"),
    ],
)
def test_what_does_not_fit_is_refused(small: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        widened(small, *arguments)
