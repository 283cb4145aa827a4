# SPDX-License-Identifier: Apache-2.0
"""A tiny target with a byte-level BPE tokenizer, and its own greedy answers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_spec_ext.training.draft.schema import DraftTraining
from vllm_spec_ext.training.shards import TokenSequence, open_manifest, shard_path, write_shard

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
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
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
    """Shards of a language in which every token follows from the one before."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    sequences = []
    for _ in range(60):
        text = random.integers(2, 48, 3).tolist()
        while len(text) < 24:
            text.append(2 + (text[-1] * 5 + 7) % 46)
        sequences.append(TokenSequence(text, 3))
    open_manifest(
        folder,
        {"num_shards": 1, "prompts_per_shard": 60, "prompts_sha256": "x", "kind": "synthetic"},
    )
    write_shard(shard_path(folder, 0), sequences)
    return folder


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
