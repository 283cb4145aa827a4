# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a large vocabulary without holding the logits of a whole batch."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from vllm_spec_ext.training.batches import IGNORED


def backward_cross_entropy(
    states: Tensor,  # [n, hidden_size], with a graph behind them
    targets: Tensor,  # [n] int64, IGNORED = no loss
    project: Callable[[Tensor], Tensor],
    chunk: int,
    weight: float = 1.0,
) -> tuple[Tensor, Tensor, int]:
    """Mean cross-entropy of projected states; its gradient is left in ``states.grad``-to-be.

    Each chunk's logits are made, differentiated down to the chunk's states, and freed; the
    collected gradient then goes into the graph behind ``states`` once. Peak memory is
    ``chunk * vocab_size``, instead of ``n * vocab_size``. Gradients also reach the projection's
    own weights where these ask for them.

    Args:
        states: Rows to project.
        targets: Right tokens.
        project: Vocabulary projection, [m, hidden_size] -> [m, vocab_size].
        chunk: Rows per chunk.
        weight: Factor on the gradient.

    Returns:
        Sum of the losses and number of right predictions (0-d tensors, so that the device need
        not be waited for), and the number of rows with a target.
    """
    keep = (targets != IGNORED).nonzero().squeeze(1)
    states, targets = states[keep], targets[keep]
    count = len(keep)
    total = torch.zeros((), device=states.device)
    correct = torch.zeros((), device=states.device)
    if not count:
        return total, correct, 0
    gradient = torch.empty_like(states)
    for start in range(0, count, chunk):
        piece = states[start : start + chunk].detach().requires_grad_()
        wanted = targets[start : start + chunk]
        with torch.enable_grad():
            logits = project(piece).float()
            loss = functional.cross_entropy(logits, wanted, reduction="sum")
            (loss * (weight / count)).backward()
        gradient[start : start + chunk] = piece.grad
        total += loss.detach()
        correct += (logits.detach().argmax(-1) == wanted).sum()
        del logits, loss
    if states.requires_grad:
        states.backward(gradient)
    return total, correct, count
