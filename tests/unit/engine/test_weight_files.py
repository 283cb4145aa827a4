# SPDX-License-Identifier: Apache-2.0
"""Which files of a checkpoint count, in the folders that people have."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_spec_ext.engine.models.memory_check import known_weight_bytes
from vllm_spec_ext.engine.models.weight_files import (
    missing_files,
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


SHARDS = {"a": "model-1.safetensors", "b": "model-2.safetensors"}


def save_shards(folder: Path) -> None:
    for name, file in SHARDS.items():
        save_file({name: torch.zeros(100)}, folder / file)
    with_index(folder, SHARDS)


def test_files_that_an_index_does_not_list_are_left_out(tmp_path: Path) -> None:
    save_shards(tmp_path)
    save_file({"x": torch.zeros(100)}, tmp_path / "adapter.safetensors")
    assert names_in(tmp_path) == list(SHARDS.values())
    assert weight_bytes(tmp_path, 4) == sum((tmp_path / f).stat().st_size for f in SHARDS.values())
    assert tensor_shapes(tmp_path) == {"a": (100,), "b": (100,)}


def test_mistrals_own_files_come_before_those_beside_them(tmp_path: Path) -> None:
    save_shards(tmp_path)
    save_file(WEIGHT, tmp_path / "consolidated.safetensors")
    assert names_in(tmp_path) == ["consolidated.safetensors"]
    (tmp_path / SHARDS["a"]).unlink()
    assert missing_files(tmp_path) == []  # as nothing reads the others


def nothing(folder: Path) -> None:
    """An empty folder."""


def both_layouts(folder: Path) -> None:
    save_shards(folder)
    save_file(WEIGHT, folder / "consolidated.safetensors")


def an_old_index(folder: Path) -> None:
    torch.save(WEIGHT, folder / "pytorch_model.bin")
    with_index(folder, SHARDS)


def leftovers_first(folder: Path) -> None:
    torch.save(WEIGHT, folder / "training_args.bin")
    torch.save(WEIGHT, folder / "model.pt")


def hidden(folder: Path) -> None:
    """As some systems put beside each file."""
    save_file(WEIGHT, folder / "model.safetensors")
    (folder / "._model.safetensors").write_bytes(b"attributes")


@pytest.mark.parametrize(
    "make", [nothing, save_shards, both_layouts, an_old_index, leftovers_first, hidden]
)
def test_they_are_what_vllm_loads(make: Callable[[Path], None], tmp_path: Path) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    make(tmp_path)
    files: list[str] = []
    with suppress(RuntimeError):  # there are none
        loader = DefaultModelLoader(LoadConfig())
        _, files, *_ = loader._prepare_weights(str(tmp_path), None, None, True, None)
    assert names_in(tmp_path) == sorted(Path(file).name for file in files)
    assert missing_files(tmp_path) == []


def test_shards_that_are_missing(tmp_path: Path) -> None:
    save_shards(tmp_path)
    for number, file in enumerate(SHARDS.values(), 1):
        (tmp_path / file).unlink()
        assert len(missing_files(tmp_path)) == number


def test_wide_numbers_shrink_as_they_load(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(1000), "b": torch.zeros(1000, dtype=torch.uint8)},
        tmp_path / "model.safetensors",
    )
    size = (tmp_path / "model.safetensors").stat().st_size
    assert weight_bytes(tmp_path, 4) == size
    assert weight_bytes(tmp_path, 2) == size - 2000
    (tmp_path / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1000)}, tmp_path / "pytorch_model.bin")
    size = (tmp_path / "pytorch_model.bin").stat().st_size
    assert (weight_bytes(tmp_path, 4), weight_bytes(tmp_path, 2)) == (size, size - 2000)
    torch.save({"a": torch.zeros(1000, dtype=torch.bfloat16)}, tmp_path / "pytorch_model.bin")
    assert weight_bytes(tmp_path, 2) == (tmp_path / "pytorch_model.bin").stat().st_size


def test_weights_that_are_quantized_while_they_load_are_not_known(tmp_path: Path) -> None:
    save_file(WEIGHT, tmp_path / "model.safetensors")

    def known(quantization: str | None, **said: object) -> int:
        config: Any = SimpleNamespace(
            quantization=quantization,
            hf_config=SimpleNamespace(**said),
            model=str(tmp_path),
            dtype=torch.float32,
        )
        return known_weight_bytes(config)

    size = (tmp_path / "model.safetensors").stat().st_size
    assert known(None) == size
    assert known("fp8") == 0
    assert known("fp8", quantization_config={}) == size  # the file holds them quantized


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
    assert weight_bytes(tmp_path, 2) == 0
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert missing_files(tmp_path) == []


@pytest.mark.parametrize("cut", [5, 40, 80, 120, 200, 300])
def test_a_download_that_broke_off_says_nothing(cut: int, tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(WEIGHT, file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:cut])
    assert tensor_shapes(tmp_path) == {}


def test_nothing_is_known_of_a_name_on_the_hub() -> None:
    assert weight_bytes(Path("someone/some-model"), 2) == 0
