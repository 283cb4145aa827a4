# SPDX-License-Identifier: Apache-2.0
"""Parts of a batch, and the states of all tokens that its blocks see."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_spec_ext.training.batches import Batch
from vllm_spec_ext.training.hidden import HiddenSource


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


def context_states(states: HiddenSource, batch: Batch, device: torch.device) -> Tensor:
    """[sequences, length, width] states of every token; zeros behind a text's end."""
    rows, columns = batch.mask.nonzero(as_tuple=True)
    found = states(replace(batch, rows=rows, columns=columns)).to(device)
    table = found.new_zeros(*batch.mask.shape, found.shape[-1])
    table[rows.to(device), columns.to(device)] = found
    return table
