# SPDX-License-Identifier: Apache-2.0
"""What the trainings learn: a language in which every token follows from the one before."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_spec_ext.training.shards import TokenSequence, open_manifest, shard_path, write_shard

VOCAB = 48


def write_texts(folder: Path) -> Path:
    """Shards of that language; tokens 0 and 1 never occur."""
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


def save_random_llama(folder: Path, **changes: Any) -> Path:
    """A target of random weights, without a tokenizer.

    Args:
        folder: Where to.
        changes: Of its configuration.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).save_pretrained(folder)
    return folder


def save_word_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)
