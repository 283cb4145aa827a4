# SPDX-License-Identifier: Apache-2.0
"""Random block drafters for the tiny target, in the public DFlash layout or with extras."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_model import HIDDEN_SIZE, VOCAB_SIZE

from vllm_spec_ext.proposers.blockwise.heads import HeadsConfig
from vllm_spec_ext.proposers.nar.layout import NarConfig
from vllm_spec_ext.training.nar.model import DrafterConfig, NarDrafter

MASK = 510


def drafter_config(target: Path, **changes: Any) -> DrafterConfig:
    """Of the target's sizes."""
    theirs = json.loads((target / "config.json").read_text())
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
    )
    given = {
        **{name: theirs[name] for name in names},
        "num_hidden_layers": 2,
        "num_target_layers": theirs["num_hidden_layers"],
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "block_size": 7,
        "mask_token_id": MASK,
        "target_layer_ids": (0, 1, 2),
        **changes,
    }
    return DrafterConfig(**given)


HEADS = HeadsConfig(
    target="tiny",
    hidden_size=HIDDEN_SIZE,
    vocab_size=VOCAB_SIZE,
    num_heads=3,
    head_width=16,
    condition_on_next=True,
    copy_match=8,
)
ALL_EXTRAS = NarConfig(
    slot_queries=True,
    copy_match=8,
    reuse_tail=True,
    heads=HEADS,
    selector_rank=16,
    draft_vocab_size=300,
)


_SIZES = {"selector": 0.05, ".heads.": 0.12, "guesses.": 0.4, "extras": 1.0, "": 0.12}
"""Spread of the random weights, by the first of these that is part of their name."""


def random_drafter(target: Path, seed: int = 3, k_norms: bool = True, **changes: Any) -> NarDrafter:
    """Large random weights, so that everything shows in what it drafts."""
    torch.manual_seed(seed)
    drafter = NarDrafter(drafter_config(target, **changes)).eval()
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, next(size for part, size in _SIZES.items() if part in name))
            elif "k_norm" in name and not k_norms:
                pass
            elif "norm" in name:
                weight.uniform_(0.7, 1.3)
            else:
                weight.normal_(0, 0.3)
    listed = drafter.extras.draft_vocab
    if listed is not None:
        vocab = drafter.config.vocab_size
        drafter.extras.draft_vocab = torch.randperm(vocab)[: len(listed)].sort().values.int()
    return drafter.requires_grad_(False)


def save_dflash(
    target: Path, folder: Path, *, seed: int = 3, k_norms: bool = True, **changes: Any
) -> str:
    """Write a random drafter; returns its folder.

    Args:
        target: Folder of the target.
        folder: Where to; made here.
        seed: Of the weights.
        k_norms: Weights of the norms of keys are random, too.
        **changes: Of its configuration.
    """
    random_drafter(target, seed, k_norms, **changes).save(folder)
    return str(folder)
