# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a method has, what they say of themselves, and what engines report of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_spec_ext.bench.drafter_check import FirstToken
from vllm_spec_ext.bench.drafter_parts import notes, parts_of, recorded
from vllm_spec_ext.bench.drafter_session import of_traces, of_turns
from vllm_spec_ext.bench.methods import Method, from_settings
from vllm_spec_ext.bench.records import TurnRecord
from vllm_spec_ext.cli.demo_drafters import demo_block_drafter, demo_heads
from vllm_spec_ext.errors import SpecExtError


def of(name: str, **settings: Any) -> list[tuple[str, str, dict[str, Any]]]:
    parts = parts_of(from_settings(name, settings))
    return [(part.kind, part.model, part.method.config or {}) for part in parts]


def test_heads_draft_chains_in_every_step() -> None:
    model = str(demo_heads())
    asked = of("blockwise", model=model, tree=True, num_speculative_tokens=16, min_confidence=0.5)
    config = {"method": "blockwise", "model": model, "num_speculative_tokens": 4}
    assert asked == [("heads", model, config | {"adaptive_length": False})]
    assert of("blockwise", model=model, num_speculative_tokens=2)[0][2] == {
        **config,
        "num_speculative_tokens": 2,
        "adaptive_length": False,
    }


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Folders of three draft models; a name would be asked for on the Hugging Face Hub."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return [str(folder) for folder in folders]


def test_methods_with_checkpoints_inside(models: list[str]) -> None:
    heads, (a, b, c) = str(demo_heads()), models
    inside = of("auto", drafter={"method": "blockwise", "model": heads})
    assert [(kind, model) for kind, model, _ in inside] == [("heads", heads)]
    assert inside[0][2]["method"] == "blockwise"
    found = of("token_tree", models=[a, {"model": b, "quantization": "fp8"}])
    assert [(kind, model) for kind, model, _ in found] == [("draft_model", a), ("draft_model", b)]
    assert all(config["method"] == "small_model" for _, _, config in found)
    assert found[1][2]["quantization"] == "fp8"
    levels = [{"method": "input_copy"}, {"model": c}]
    assert [model for _, model, _ in of("cascade", levels=levels)] == [c]
    levels = [{"method": "blockwise", "model": heads}, {"model": c}]
    assert [model for _, model, _ in of("cascade", levels=levels)] == [heads, c]


def test_an_eagle3_head_is_known_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"})
    )
    assert of("small_model", model=str(tmp_path))[0][0] == "eagle3"


def test_methods_of_vllm_stay_as_they_are() -> None:
    assert of("dflash", model="x") == [("block", "x", {"method": "dflash", "model": "x"})]
    assert of("medusa", model="x")[0][0] == "other"


@pytest.mark.parametrize("name", ["input_copy", "suffix_tree", "auto", "ngram", "cache_view"])
def test_methods_without_a_trained_drafter(name: str) -> None:
    assert of(name) == []
    assert parts_of(Method("plain", None)) == []


def test_figures_of_the_packaged_heads() -> None:
    (part,) = parts_of(from_settings("blockwise", {"model": str(demo_heads())}))
    found = recorded(part)
    assert found.everywhere == 0.7096
    # Harder where drafts start: 1.368 of 1.8505 accepted tokens a draft.
    assert found.at_starts == pytest.approx(0.7096 * 1.368 / 1.8505)
    assert len(found.per_token) == 4
    assert notes(found, "/models/SmolLM2-135M-Instruct") == []
    assert "trained for" in notes(found, "/models/other")[0]


def test_figures_of_the_packaged_block_drafter() -> None:
    (part,) = parts_of(from_settings("nar", {"model": str(demo_block_drafter())}))
    found = recorded(part)
    assert found.layers == (9, 19, 29)
    assert found.everywhere == 0.6168
    assert found.expected == pytest.approx(0.6168 * 1.2205 / 1.7956)


def test_figures_of_a_trained_draft_model(tmp_path: Path) -> None:
    figures = {"acceptance_per_position": [0.5, 0.3], "accuracy": {"top1": 0.6}}
    (tmp_path / "training.json").write_text(json.dumps({"target": "t", "figures": figures}))
    (part,) = parts_of(from_settings("small_model", {"model": str(tmp_path)}))
    found = recorded(part)
    assert (found.everywhere, found.at_starts, found.target) == (0.6, 0.5, "t")


def test_damaged_files_record_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (part,) = parts_of(from_settings("blockwise", {"model": str(tmp_path)}))
    assert recorded(part).at_starts is None


def step(tokens: list[int], new: list[int]) -> dict[str, Any]:
    return {"tokens": tokens, "new_tokens": new}


def test_first_tokens_of_recorded_steps() -> None:
    steps = [step([], [1]), step([2, 3], [2, 9]), step([], [4]), step([7], [5]), step([], [6])]
    trace = {"prompt": [0], "output": [1, 2, 9, 4, 5, 6], "steps": steps}
    short = {"prompt": [0], "output": [1], "steps": [step([], [1])]}
    found = of_traces([short, trace])
    assert found.firsts == (FirstToken(0, 1, True, 2), FirstToken(0, 4, False, 7))
    assert found.num_silent == 1  # neither the prefill nor the last token
    assert found.answers == (([0], [1, 2, 9, 4, 5, 6]),)
    with pytest.raises(SpecExtError, match="no answer is longer than two tokens"):
        of_traces([short])


def test_first_tokens_of_step_sizes() -> None:
    turn = TurnRecord(3, (1, 2, 3, 4, 5), (1, 2, 1, 1), 0.0, 0.0, (0.0,) * 4)
    found = of_turns([turn], [[0, 0, 0]])
    assert found.firsts == (FirstToken(0, 1, True), FirstToken(0, 3, False))
