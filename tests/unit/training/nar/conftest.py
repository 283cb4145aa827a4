# SPDX-License-Identifier: Apache-2.0
"""A tiny target, and texts of a language in which every token follows from the one before."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_spec_ext.training.nar.schema import NarTraining
from vllm_spec_ext.training.shards import TokenSequence, open_manifest, shard_path, write_shard

VOCAB = 48


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
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
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
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of that language; tokens 0 and 1 never occur."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    sequences = []
    for _ in range(60):
        text = random.integers(2, VOCAB, 3).tolist()  # the prompt, so that no text is there twice
        while len(text) < 24:
            text.append(2 + (text[-1] * 5 + 7) % (VOCAB - 2))
        sequences.append(TokenSequence(text, 3))
    open_manifest(
        folder,
        {"num_shards": 1, "prompts_per_shard": 60, "prompts_sha256": "x", "kind": "synthetic"},
    )
    write_shard(shard_path(folder, 0), sequences)
    return folder


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
