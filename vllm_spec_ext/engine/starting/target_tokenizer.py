# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that an engine uses, for those who must check that a file belongs to it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig


def load_tokenizer(model_config: "ModelConfig") -> object | None:
    """vLLM's own, cached; ``None`` for an engine that works on token ids alone."""
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)
