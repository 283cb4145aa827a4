# SPDX-License-Identifier: Apache-2.0
"""Losses over a large vocabulary without holding the logits of a whole batch."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from vllm_spec_ext.training.batches import IGNORED

# (states of a chunk [m, hidden_size], its place) -> (0-d loss, 0-d count of right predictions)
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def backward_chunks(
    states: Tensor,  # [n, hidden_size], with a graph behind them
    loss_of: ChunkLoss,
    chunk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of all chunks; its gradient is left in ``states.grad``-to-be.

    Each chunk's logits are made, differentiated down to the chunk's states, and freed; the
    collected gradient then goes into the graph behind ``states`` once. Peak memory is
    ``chunk * vocab_size``, instead of ``n * vocab_size``. Gradients also reach the projection's
    own weights where these ask for them.

    Args:
        states: Rows to project.
        loss_of: Projects a chunk; its loss is a sum over rows.
        chunk: Rows per chunk.
        scale: Factor on the gradient.

    Returns:
        Sum of the losses and number of right predictions (0-d tensors, so that the device need
        not be waited for).
    """
    total = torch.zeros((), device=states.device)
    correct = torch.zeros((), device=states.device)
    gradient = torch.empty_like(states)
    for start in range(0, len(states), chunk):
        place = slice(start, start + chunk)
        piece = states[place].detach().requires_grad_()
        with torch.enable_grad():
            loss, right = loss_of(piece, place)
            (loss * scale).backward()
        gradient[place] = piece.grad
        total += loss.detach()
        correct += right
        del loss
    if states.requires_grad:
        states.backward(gradient)
    return total, correct


def backward_cross_entropy(
    states: Tensor,  # [n, hidden_size], with a graph behind them
    targets: Tensor,  # [n] int64, IGNORED = no loss
    project: Callable[[Tensor], Tensor],
    chunk: int,
    weight: float = 1.0,
) -> tuple[Tensor, Tensor, int]:
    """Mean cross-entropy of projected states, chunk by chunk (:func:`backward_chunks`).

    Args:
        states: Rows to project.
        targets: Right tokens.
        project: Vocabulary projection, [m, hidden_size] -> [m, vocab_size].
        chunk: Rows per chunk.
        weight: Factor on the gradient.

    Returns:
        Sum of the losses and number of right predictions (0-d tensors), and the number of rows
        with a target.
    """
    keep = (targets != IGNORED).nonzero().squeeze(1)
    states, targets = states[keep], targets[keep]
    count = len(keep)
    if not count:
        nothing = torch.zeros((), device=states.device)
        return nothing, nothing.clone(), 0

    def loss_of(piece: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        logits, wanted = project(piece).float(), targets[place]
        loss = functional.cross_entropy(logits, wanted, reduction="sum")
        return loss, (logits.detach().argmax(-1) == wanted).sum()

    total, correct = backward_chunks(states, loss_of, chunk, weight / count)
    return total, correct, count
