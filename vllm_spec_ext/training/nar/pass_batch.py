# SPDX-License-Identifier: Apache-2.0
"""Parts of a batch, and the states of all tokens that its blocks see."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_spec_ext.proposers.nar.extras import Copies
from vllm_spec_ext.training.batches import Batch
from vllm_spec_ext.training.hidden import HiddenSource
from vllm_spec_ext.training.nar.blocks import Blocks, block_ids
from vllm_spec_ext.training.nar.losses import SlotTokens
from vllm_spec_ext.training.nar.model import NarDrafter
from vllm_spec_ext.training.target import Target


def some_sequences(batch: Batch, low: int, high: int) -> tuple[Batch, NDArray[np.int64]]:
    """Sequences ``low`` to ``high`` of a batch, and which of its positions are theirs."""
    places = ((batch.rows >= low) & (batch.rows < high)).nonzero().squeeze(1)
    width = int(batch.mask[low:high].sum(1).max())
    part = Batch(
        sequences=batch.sequences[low:high],
        token_ids=batch.token_ids[low:high, :width],
        mask=batch.mask[low:high, :width],
        rows=batch.rows[places] - low,
        columns=batch.columns[places],
        next_tokens=batch.next_tokens[places],
        targets=batch.targets[places],
        inputs=tuple(values[places] for values in batch.inputs),
    )
    return part, places.numpy()


class StatesRead(NamedTuple):
    """What a drafter reads of the target, of some sequences."""

    context: Tensor  # [sequences, length, width] of all layers that are read, divided by scales
    last: Tensor  # [sequences, length, hidden] of the last of these, as the target has it

    def finals(self, target: Target, blocks: Blocks) -> Tensor:
        """[sequences, blocks, hidden] final states of the tokens in front of the blocks."""
        rows = torch.arange(len(self.last), device=self.last.device).unsqueeze(1)
        return target.final_states(self.last[rows, blocks.anchors - 1])


def read_states(
    states: HiddenSource, batch: Batch, target: Target, scales: torch.nn.Module
) -> StatesRead:
    """What the drafter reads of a batch, without gradients."""
    with torch.no_grad():
        found = context_states(states, batch, target.device)
        return StatesRead(scales(found), found[..., -target.hidden_size :])


def slot_states(
    drafter: NarDrafter, target: Target, read: StatesRead, blocks: Blocks, shown: Tensor
) -> Tensor:
    """[sequences, blocks, slots, hidden] final states of the slots.

    Args:
        drafter: In training or not.
        target: Its embeddings.
        read: The states in front of the blocks.
        blocks: Where they start, and their copies.
        shown: [sequences, blocks, slots] bool: slots that hold the right tokens.
    """
    copies = finals = None
    if blocks.copies is not None and blocks.kinds is not None:
        copies = Copies(blocks.copies, blocks.kinds)
    if drafter.extras.guesses is not None:
        with torch.no_grad():
            finals = read.finals(target, blocks)
    ids = block_ids(blocks, shown, drafter.config.mask_token_id)
    made: Tensor = drafter(read.context, blocks.anchors, ids, target.embed, copies, finals)
    return made


def slot_tokens(blocks: Blocks) -> SlotTokens:
    """What belongs to the slots of all blocks, [sequences * blocks * slots] rows."""
    slots = torch.arange(blocks.targets.shape[-1], device=blocks.targets.device)
    return SlotTokens(
        blocks.targets.flatten(),
        blocks.before().flatten(),
        slots.expand_as(blocks.targets).flatten(),
        None if blocks.copies is None else blocks.copies.flatten(),
        None if blocks.kinds is None else blocks.kinds.flatten(),
    )


def context_states(states: HiddenSource, batch: Batch, device: torch.device) -> Tensor:
    """[sequences, length, width] states of every token; zeros behind a text's end."""
    rows, columns = batch.mask.nonzero(as_tuple=True)
    found = states(replace(batch, rows=rows, columns=columns)).to(device)
    table = found.new_zeros(*batch.mask.shape, found.shape[-1])
    table[rows.to(device), columns.to(device)] = found
    return table
