# SPDX-License-Identifier: Apache-2.0
"""A tiny target, and texts of a language in which every token follows from the one before."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_language import save_random_llama, save_word_tokenizer, write_texts

from vllm_spec_ext.training.nar.schema import NarTraining


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads cost more than they save on models this small, above all on a busy machine."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random three-layer Llama with a word-level tokenizer."""
    folder = save_random_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=3)
    save_word_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of texts."""
    return write_texts(tmp_path_factory.mktemp("data"))


@pytest.fixture
def settings(target: Path, data: Path, tmp_path: Path) -> Callable[..., NarTraining]:
    """Settings of a short run."""

    def make(**changes: Any) -> NarTraining:
        facts: dict[str, Any] = {
            "model": str(target),
            "data": data,
            "out": tmp_path / "drafter",
            "slots": 3,
            "layers": 1,
            "selector_rank": 8,
            "draft_vocab": None,
            "tree_nodes": [5],
            "max_steps": 30,
            "batch_size": 8,
            "positions_per_sequence": 10,
            "learning_rate": 0.01,
            "dropout": 0.0,
            "logit_chunk": 32,
            "eval_every": 1000,
            "device": "cpu",
            "save_dtype": "fp32",
        }
        return NarTraining.model_validate({**facts, **changes})

    return make
