# SPDX-License-Identifier: Apache-2.0
"""States recorded while the data is generated are those that a second pass would give."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_spec_ext.proposers import registry
from vllm_spec_ext.training.batches import make_batch
from vllm_spec_ext.training.blockwise.schema import BlockwiseTraining
from vllm_spec_ext.training.distill import make_data, vllm_generator
from vllm_spec_ext.training.hidden import has_recorded_states, live_states, recorded_states
from vllm_spec_ext.training.record_states import METHOD
from vllm_spec_ext.training.shards import read_data
from vllm_spec_ext.training.target import load_target, load_tokenizer


@pytest.mark.usefixtures("_one_process_many_engines")
def test_recorded_states_are_the_targets(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"the number {i} is {'very ' * (i % 5)}small\n" for i in range(10)))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setitem(registry.BUILTIN, METHOD, "x:y")  # taken back after the test
    config = BlockwiseTraining(
        model=str(tiny_model),
        out=tmp_path / "heads",
        prompts=[prompts],
        chat="never",
        cache_hidden=True,
        prompts_per_shard=4,
        max_prompt_tokens=64,
        max_new_tokens=12,
    )
    make_data(config, load_tokenizer(str(tiny_model)), lambda: vllm_generator(config))
    data = read_data(config.data_folder)
    assert has_recorded_states(data)
    assert not list((config.data_folder / "recording").iterdir())
    target = load_target(str(tiny_model), torch.device("cpu"), torch.float32)
    batch = make_batch(data, np.array([7, 0, 9, 3]), 2, 100)
    found, expected = recorded_states(target, data)(batch), live_states(target)(batch)
    assert torch.allclose(found, expected, atol=2e-4)
