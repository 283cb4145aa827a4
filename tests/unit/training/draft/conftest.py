# SPDX-License-Identifier: Apache-2.0
"""A tiny target with a byte-level BPE tokenizer, and its own greedy answers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_language import save_random_llama, write_texts

from vllm_spec_ext.training.draft.schema import DraftTraining

LAYERS = 4
VOCAB = 320
SENTENCES = [
    "the quick brown fox jumps over the lazy dog and the lazy dog sleeps",
    "there is nothing that the other things in there would bring together",
    "that this should then be the thing is another story and the better",
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads cost more than they save on models this small, above all on a busy machine."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random four-layer Llama: 4 heads that share 2 KV heads."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    folder = save_random_llama(
        tmp_path_factory.mktemp("target"), vocab_size=VOCAB, num_hidden_layers=LAYERS
    )
    words = ByteLevelBPETokenizer()
    words.train_from_iterator(
        SENTENCES * 4,
        vocab_size=VOCAB,
        min_frequency=1,
        special_tokens=["<end>"],
        show_progress=False,
    )
    words.save(str(folder / "raw.json"))
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "raw.json"), eos_token="<end>", unk_token="<end>"
    ).save_pretrained(folder)
    (folder / "raw.json").unlink()
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of texts, of 48 of the tokens."""
    return write_texts(tmp_path_factory.mktemp("data"))


@pytest.fixture
def settings(target: Path, data: Path, tmp_path: Path) -> Callable[..., DraftTraining]:
    """Settings of a short run."""

    def make(**changes: Any) -> DraftTraining:
        facts: dict[str, Any] = {
            "model": str(target),
            "data": data,
            "out": tmp_path / "draft",
            "layers": 2,
            "max_steps": 12,
            "batch_size": 8,
            "positions_per_sequence": 10,
            "learning_rate": 0.01,
            "logit_chunk": 32,
            "eval_every": 1000,
            "device": "cpu",
            "save_dtype": "fp32",
        }
        return DraftTraining.model_validate({**facts, **changes})

    return make
