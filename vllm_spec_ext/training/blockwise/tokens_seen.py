# SPDX-License-Identifier: Apache-2.0
"""What heads are shown beside the hidden state at positions of a training text."""

import torch

from vllm_spec_ext.proposers.blockwise.heads import TokensSeen
from vllm_spec_ext.training.batches import Batch


def tokens_seen(batch: Batch, part: slice, device: torch.device) -> TokensSeen:
    """What heads see of some positions of a batch, on a device.

    Args:
        batch: Its inputs are those of :class:`~..text_copies.TextCopies`, or none.
        part: Which of its positions.
        device: Where the heads are.
    """
    return TokensSeen(*(t[part].to(device) for t in (batch.next_tokens, *batch.inputs)))
