# SPDX-License-Identifier: Apache-2.0
"""Which files are weights of the draft model that drafts; loading them needs an engine."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.small_model import SmallModel
from vllm_spec_ext.proposers.small_model.options import SmallModelOptions


def write(folder: Path, *names: str, width: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: torch.zeros(width) for name in names}, folder / "model.safetensors")
    return folder


def test_versions_have_the_names_and_shapes_of_the_first(tmp_path: Path) -> None:
    method = SmallModel(SmallModelOptions(model="any"))
    method.read_weights(write(tmp_path / "0", "a", "b", "lm_head.weight"))
    # A projection that is the embedding may be left out by one who writes it.
    assert method.read_weights(write(tmp_path / "1", "a", "b")).keys() == {"a", "b"}
    for names, width, words in (
        (("a",), 2, "b has the shape None"),
        (("a", "b", "c"), 2, "c has the shape"),
        (("a", "b"), 3, "a has the shape"),
    ):
        with pytest.raises(SpecExtError, match=words):
            method.read_weights(write(tmp_path / "other", *names, width=width))
