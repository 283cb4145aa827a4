# SPDX-License-Identifier: Apache-2.0
"""Which files of a checkpoint count, in the folders that people have."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_spec_ext.engine.models.weight_files import (
    listed_files,
    tensor_shapes,
    weight_bytes,
    weight_files,
)

WEIGHT = {"fc.weight": torch.zeros(2, 3)}


def names_in(folder: Path) -> list[str]:
    return [file.name for file in weight_files(folder)]


def with_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    index = {"weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_beside_the_same_weights_in_one_file_count_once(tmp_path: Path) -> None:
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, file in shards.items():
        save_file({name: torch.zeros(100)}, tmp_path / file)
    save_file({name: torch.zeros(100) for name in shards}, tmp_path / "consolidated.safetensors")
    assert names_in(tmp_path) == list(shards.values())  # by their names
    save_file({"x": torch.zeros(100)}, tmp_path / "adapter.safetensors")
    with_index(tmp_path, shards)
    assert names_in(tmp_path) == list(shards.values())
    assert weight_bytes(tmp_path) == sum((tmp_path / f).stat().st_size for f in shards.values())
    assert tensor_shapes(tmp_path) == {"a": (100,), "b": (100,)}


def test_a_file_of_that_name_alone_counts(tmp_path: Path) -> None:
    save_file(WEIGHT, tmp_path / "consolidated.safetensors")
    assert names_in(tmp_path) == ["consolidated.safetensors"]


def test_what_training_leaves_behind_is_no_weights(tmp_path: Path) -> None:
    torch.save(tmp_path, tmp_path / "training_args.bin")  # an object of some class
    torch.save({"state": {0: {"step": 1}}, "param_groups": []}, tmp_path / "optimizer.pt")
    assert names_in(tmp_path) == []
    assert tensor_shapes(tmp_path) == {}
    torch.save({**WEIGHT, "epoch": 3}, tmp_path / "pytorch_model.bin")
    assert names_in(tmp_path) == ["pytorch_model.bin"]
    assert tensor_shapes(tmp_path) == {"fc.weight": (2, 3)}


def test_the_older_format_of_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(WEIGHT, file, _use_new_zipfile_serialization=False)
    assert tensor_shapes(tmp_path) == {"fc.weight": (2, 3)}


def test_files_that_cannot_be_read_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert tensor_shapes(tmp_path) == {}
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert tensor_shapes(tmp_path) == {}
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert listed_files(tmp_path) == set()


def test_nothing_is_known_of_a_name_on_the_hub() -> None:
    assert weight_bytes(Path("someone/some-model")) == 0
