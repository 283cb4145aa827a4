# SPDX-License-Identifier: Apache-2.0
"""Versions of a block drafter: which may take over while requests run, and what can be trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from unreadable_files import make_unreadable, said_to_be_unreadable

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.nar.layout import (
    CONFIG_NAME,
    EXTRAS_NAME,
    MASK_NAME,
    WEIGHTS_NAME,
    NarConfig,
    makes_context,
)
from vllm_spec_ext.proposers.nar.versions import (
    check_same_drafter,
    drafter_files,
    drafter_folder,
    read_version,
)
from vllm_spec_ext.training.nar.model import DrafterConfig, NarDrafter


def save(folder: Path) -> Path:
    torch.manual_seed(0)
    config = DrafterConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=20,
        block_size=4,
        mask_token_id=19,
        target_layer_ids=(0, 2),
        num_target_layers=3,
        own_mask_embedding=True,
        nar=NarConfig(slot_queries=True, selector_rank=2, draft_vocab_size=10),
    )
    NarDrafter(config).save(folder)
    return folder


def change(folder: Path, file: str, name: str, how: Callable[[Any], Any]) -> None:
    weights = load_file(folder / file)
    made = how(weights.pop(name)) if name in weights else how(None)
    weights |= {} if made is None else {name: made}
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / file)


def test_everything_but_the_context_side_may_differ(tmp_path: Path) -> None:
    """Each weight by itself; a number format is no difference."""
    own = read_version(save(tmp_path / "own"))
    drafter = NarDrafter.load(tmp_path / "own")
    refused = set()
    for name in drafter.state_dict():
        other = NarDrafter.load(tmp_path / "own")
        value = other.state_dict()[name]
        value.add_(1)
        other.save(tmp_path / "other")
        try:
            check_same_drafter(own, read_version(tmp_path / "other"), tmp_path / "other")
        except SpecExtError:
            refused.add(name)
    assert refused == {n for n in drafter.state_dict() if makes_context(n)} | {"extras.draft_vocab"}
    kinds = ("k_proj", "v_proj", "k_norm")
    layers = {f"layers.{i}.self_attn.{kind}.weight" for i in (0, 1) for kind in kinds}
    assert refused == {"fc.weight", "hidden_norm.weight", "extras.draft_vocab", *layers}
    # As a server might have it; float32 holds these values exactly.
    NarDrafter.load(tmp_path / "own").save(tmp_path / "half", torch.bfloat16)
    half = read_version(tmp_path / "half")
    NarDrafter.load(tmp_path / "half").save(tmp_path / "again")
    check_same_drafter(half, read_version(tmp_path / "again"), tmp_path)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME, MASK_NAME, EXTRAS_NAME])
def test_files_that_cannot_be_read_are_not_called_damaged(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "own")
    make_unreadable(folder / name)
    with said_to_be_unreadable(folder / name):
        read_version(folder)
    with said_to_be_unreadable(folder / name):
        drafter_folder(str(folder))


def test_damaged_folders(tmp_path: Path) -> None:
    for name in (CONFIG_NAME, WEIGHTS_NAME, MASK_NAME, EXTRAS_NAME):
        folder = save(tmp_path / name.replace("/", "-"))
        (folder / name).write_bytes(b"noise")
        with pytest.raises(SpecExtError, match="no whole drafter"):
            read_version(folder)
    for number, content in enumerate(("[]", '"text"', "null")):
        folder = save(tmp_path / f"other {number}")
        (folder / CONFIG_NAME).write_text(content)
        with pytest.raises(SpecExtError, match="no whole drafter"):
            read_version(folder)
        with pytest.raises(SpecExtError, match="expected an object"):
            drafter_folder(str(folder))
    folder = save(tmp_path / "infinite")
    change(folder, EXTRAS_NAME, "slot_queries", lambda values: values / 0.0)
    with pytest.raises(SpecExtError, match="slot_queries holds values that are not finite"):
        read_version(folder)


def test_files_are_all_of_a_drafter(tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter")
    (folder / "README.md").write_text("not part of it")
    assert drafter_folder(str(folder)) == folder
    assert set(drafter_files(folder)) == {CONFIG_NAME, WEIGHTS_NAME, MASK_NAME, EXTRAS_NAME}


def test_nothing_of_an_earlier_drafter_stays(tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter")
    without = NarDrafter.load(folder)
    without.mask_embedding = None
    without.save(folder)
    assert not (folder / MASK_NAME).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "found attention_bias True, expected False"),
        ({"hidden_act": "gelu"}, "found hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "found quantization_config"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "found rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "found rope_type 'yarn'"),
        ({"dflash_config": {"mask_token_id": 1}}, "no dflash_config with mask_token_id and target"),
        ({"num_target_layers": None}, "found no num_target_layers"),
        ({"is_causal": True}, "found is_causal"),
        ({"num_hidden_layers": 3}, "found no tensor layers.2."),
    ],
)
def test_what_the_trainer_does_not_know_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "drafter")
    config = json.loads((folder / CONFIG_NAME).read_text())
    (folder / CONFIG_NAME).write_text(json.dumps({**config, **changes}))
    with pytest.raises(SpecExtError, match=message):
        drafter_folder(str(folder))


def test_tensors_that_the_trainer_does_not_know(tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter")
    change(folder, WEIGHTS_NAME, "embed_tokens.weight", lambda _: torch.zeros(20, 8))
    with pytest.raises(SpecExtError, match=r"found a tensor embed_tokens\.weight"):
        drafter_folder(str(folder))
    (folder / WEIGHTS_NAME).unlink()
    with pytest.raises(SpecExtError, match="found no readable"):
        drafter_folder(str(folder))
