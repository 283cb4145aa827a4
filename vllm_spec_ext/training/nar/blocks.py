# SPDX-License-Identifier: Apache-2.0
"""Blocks of a batch: where they start, and which right tokens they are shown.

Three kinds. *Plain* blocks look as in drafting, masks and copies only. *Glancing* blocks (GAD, Xia
et al. 2022, arXiv 2203.16487) are guessed first, and the more guesses are wrong, the more right
tokens are put in random slots. *Prefix* blocks show the first right tokens, as if a part of the
draft were known. What is shown is not learned.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_spec_ext.training.batches import IGNORED, Batch


class Shown(NamedTuple):
    """Kind of each position's block."""

    glances: NDArray[np.bool_]  # [n]
    prefix: NDArray[np.int64]  # [n] first slots that hold the right tokens; 0 = none


def choose_kinds(
    count: int, slots: int, glancing: float, prefix: float, random: np.random.Generator
) -> Shown:
    """Draw a kind for each of ``count`` blocks; the parts are met but for rounding."""
    order = random.permutation(count)
    num_glancing = round(count * glancing)
    num_prefix = round(count * prefix) if slots > 1 else 0
    glances = np.zeros(count, np.bool_)
    glances[order[:num_glancing]] = True
    lengths = np.zeros(count, np.int64)
    chosen = order[num_glancing : num_glancing + num_prefix]
    lengths[chosen] = random.integers(1, max(2, slots), len(chosen))
    return Shown(glances, lengths)


class Blocks(NamedTuple):
    """Blocks of some sequences, as many rows for each; rows without a block have no targets."""

    anchors: Tensor  # [b, m] int64 index of the block's first token, which stands in its first row
    first: Tensor  # [b, m] int64 that token
    targets: Tensor  # [b, m, slots] int64, IGNORED past the text's end
    copies: Tensor | None  # [b, m, slots] int64
    kinds: Tensor | None  # [b, m, slots] int64 tokens that agree with the copy's place; 0 = none
    prefix: Tensor  # [b, m] int64 first slots to show

    def to(self, device: torch.device) -> "Blocks":
        """On a device."""
        return Blocks(*(None if part is None else part.to(device) for part in self))

    def before(self) -> Tensor:
        """[b, m, slots] int64 right token in front of each slot; IGNORED where there is none."""
        return torch.cat([self.first.unsqueeze(-1), self.targets[..., :-1]], dim=-1)


def arrange(batch: Batch, prefix: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Blocks:
    """Positions of a batch as blocks, sequence by sequence.

    Args:
        batch: Its positions t are the last known ones; a block's first token is t + 1.
        prefix: [n] first slots to show, of each position.
        chosen: [n] positions that are wanted.
    """
    rows = batch.rows[torch.from_numpy(chosen)]
    num_sequences = len(batch.sequences)
    counts = torch.bincount(rows, minlength=num_sequences)
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(rows)) - starts[rows]
    shape = (num_sequences, int(counts.max()) if len(rows) else 0)

    def spread(values: Tensor, fill: int) -> Tensor:
        table = torch.full((*shape, *values.shape[1:]), fill, dtype=torch.int64)
        table[rows, places] = values[torch.from_numpy(chosen)]
        return table

    copies = kinds = None
    if batch.inputs:
        tokens, lengths = batch.inputs
        copies = spread(tokens, 0)
        kinds = spread(lengths.unsqueeze(1).expand_as(tokens), 0)
    return Blocks(
        anchors=spread(batch.columns + 1, 1),
        first=spread(batch.next_tokens, 0),
        targets=spread(batch.targets, IGNORED),
        copies=copies,
        kinds=kinds,
        prefix=spread(torch.from_numpy(prefix), 0),
    )


def prefix_shown(blocks: Blocks) -> Tensor:
    """[b, m, slots] bool: slots of the visible prefix that have a right token."""
    slots = torch.arange(blocks.targets.shape[-1], device=blocks.targets.device)
    return (slots < blocks.prefix.unsqueeze(-1)) & (blocks.targets != IGNORED)


def glanced(
    wrong: Tensor,  # [b, m, slots] bool: wrong guesses
    targets: Tensor,  # [b, m, slots] int64
    part: float,
    draws: Tensor,  # [b, m, slots] float32 in [0, 1), the random order of the slots
) -> Tensor:
    """[b, m, slots] bool: slots that are shown, ``part`` of the wrong guesses, anywhere.

    As in GAD the slots are any of the block's, not the wrong ones only.
    """
    known = targets != IGNORED
    amount = ((wrong & known).sum(-1, keepdim=True) * part).round()
    order = torch.where(known, draws, 2.0).argsort(-1).argsort(-1)
    return (order < amount) & known


def block_ids(blocks: Blocks, shown: Tensor, mask_token: int) -> Tensor:
    """[b, m, 1 + slots] int64: the first token, right tokens where shown, masks elsewhere."""
    slots = torch.where(shown, blocks.targets.clamp(min=0), mask_token)
    return torch.cat([blocks.first.unsqueeze(-1), slots], dim=-1)
