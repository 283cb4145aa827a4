# SPDX-License-Identifier: Apache-2.0
"""Random draft models for the tiny target: its tokenizer, another configuration."""

import shutil
from pathlib import Path
from typing import Any


def save_draft(target: Path, folder: Path, *, seed: int = 5, **changes: Any) -> str:
    """Write a random Llama to a folder.

    Args:
        target: Folder whose tokenizer and configuration it has.
        folder: Where to; must not exist.
        seed: Of the weights.
        **changes: Of the configuration.

    Returns:
        The folder.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(target, folder)
    config = LlamaConfig.from_pretrained(target)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.12)
    model.save_pretrained(folder)
    return str(folder)
