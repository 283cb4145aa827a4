# SPDX-License-Identifier: Apache-2.0
"""States of several layers: what they are, and that the disk gives back what was computed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.batches import Batch, make_batch
from vllm_spec_ext.training.hidden import cached_states, live_states, write_cache
from vllm_spec_ext.training.shards import read_data
from vllm_spec_ext.training.target import Target, load_target

LAYERS = (0, 2, 3)


@pytest.fixture(scope="module")
def loaded(target: Path) -> Target:
    return load_target(str(target), torch.device("cpu"), torch.float32)


@pytest.fixture
def batch(data: Path) -> Batch:
    """All tokens of three texts, from different places in a shard."""
    made = make_batch(read_data(data), np.array([7, 0, 59]), 1, 20)
    rows, columns = made.mask.nonzero(as_tuple=True)
    return replace(made, rows=rows, columns=columns)


def test_layers_are_the_residual_stream(loaded: Target, batch: Batch) -> None:
    ids, mask = batch.token_ids, batch.mask
    with torch.no_grad():
        states = loaded.hidden(ids, mask, LAYERS)
        final = loaded.hidden(ids, mask)
    size = loaded.hidden_size
    assert states.shape == (*ids.shape, 3 * size)
    assert torch.equal(states[..., :size], loaded.embed(ids))
    # Behind the last layer, before the norm that transformers applies.
    norm = loaded.model.base_model.norm
    assert torch.allclose(norm(states[..., -size:]), final, atol=1e-6)
    assert torch.equal(loaded.hidden(ids, mask, (2,)), states[..., size : 2 * size])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_disk_gives_back_what_was_computed(
    loaded: Target, data: Path, batch: Batch, tmp_path: Path, dtype: torch.dtype
) -> None:
    tokens = read_data(data)
    write_cache(tmp_path, loaded, tokens, 20, batch_size=7, layers=LAYERS, dtype=dtype)
    stored = load_file(tmp_path / "hidden-00000.safetensors")["hidden"]
    assert stored.dtype is dtype
    assert stored.shape == (60 * 20, 3 * loaded.hidden_size)
    with torch.no_grad():
        live = live_states(loaded, LAYERS)(batch)
    found = cached_states(tmp_path, loaded, tokens, 20, LAYERS)(batch)
    assert torch.allclose(found, live, atol=1e-5 if dtype is torch.float32 else 0.1)
    with pytest.raises(SpecExtError, match=r"shape \(1200, 96\), expected \(1200, 64\)"):
        cached_states(tmp_path, loaded, tokens, 20, (0, 2))(batch)
    with pytest.raises(SpecExtError, match="made with other settings"):
        write_cache(tmp_path, loaded, tokens, 20, batch_size=7, layers=(0, 2), dtype=dtype)
