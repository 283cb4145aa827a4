# SPDX-License-Identifier: Apache-2.0
"""Eta sampling: drop tokens whose probability is noise at the row's entropy.

Hewitt, Manning, Liang 2022 (truncation sampling as language model desmoothing):
``eta = min(epsilon, alpha * exp(-entropy))``, entropy in nats; tokens with ``p < eta`` go, the most
probable ones stay, the rest is renormalised (by the softmax that follows). Order of sampling
constraints: temperature, top-k and top-p, then eta on what they left.

A property of the *target's* distribution: it must be applied to verified rows, bonus rows and plain
steps alike, or the output follows neither distribution. It never changes an argmax.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_spec_ext.compiled import kernel
from vllm_spec_ext.scorers.options import EtaOptions


def apply_eta(
    logits: Tensor,  # [num_rows, vocab] float32, after temperature, top-k and top-p; written to
    epsilon: Tensor,  # [num_rows] float32; 0 leaves the row alone (greedy, requests without eta)
    alpha: Tensor | None = None,  # [num_rows] float32; None or entries <= 0: sqrt(epsilon)
) -> Tensor:
    """Set the logits of dropped tokens to ``-inf``, in place as vLLM's own constraints do.

    Returns:
        ``logits``.
    """
    root = epsilon.sqrt()
    weight = root if alpha is None else torch.where(alpha > 0, alpha, root)
    if logits.device.type != "cpu":
        _cut(logits, epsilon, weight)  # no host synchronisation: rows with epsilon 0 lose nothing
        return logits
    for row in torch.nonzero(epsilon > 0)[:, 0].tolist():  # row by row: p stays in the cache
        p = logits[row].softmax(dim=0)
        best = (float(logits[row].amax()), float(p.amax()))
        _cut_row(logits[row].numpy(), p.numpy(), best, float(epsilon[row]), float(weight[row]))
    return logits


# reassoc: the sum is vectorised. Where p underflows to 0, the clamp keeps 0 * -inf out of it.
@kernel(fastmath={"reassoc"})
def _mean_below_best(logits, p, best):  # type: ignore[no-untyped-def]
    total = 0.0
    for x in range(p.shape[0]):
        total += p[x] * max(logits[x] - best, np.float32(-200.0))
    return total


@kernel
def _cut_row(logits, p, best, epsilon, alpha):  # type: ignore[no-untyped-def]
    logit_best, p_best = best
    entropy = -(math.log(p_best) + _mean_below_best(logits, p, np.float32(logit_best)))
    eta = np.float32(min(epsilon, alpha * math.exp(-entropy), p_best))
    for x in range(p.shape[0]):
        logits[x] = logits[x] if not (p[x] < eta) else -np.inf


def _cut(logits: Tensor, epsilon: Tensor, alpha: Tensor) -> None:
    best = logits.amax(dim=1, keepdim=True)
    p = logits.softmax(dim=1)
    p_best = p.amax(dim=1, keepdim=True)
    # -log p = log Z - x, and log Z = best - log p_best. Where p underflows to 0, the clamp keeps
    # the product 0 instead of 0 * -inf.
    shifted = (logits - best).clamp_(min=-200.0)
    mean = torch.bmm(p[:, None, :], shifted[:, :, None])[:, :, 0]
    entropy = -(p_best.log() + mean)
    eta = torch.minimum(epsilon[:, None], alpha[:, None] * (-entropy).exp())
    # alpha above 1 may lift eta over the best token, which stays all the same, ties included.
    logits.masked_fill_(p < torch.minimum(eta, p_best), -torch.inf)


def eta_parameters(
    options: Sequence[EtaOptions | None],
    num_rows: Sequence[int],
    greedy: Sequence[bool],
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Per-row parameters of a batch.

    Args:
        options: One a request; None switches eta off.
        num_rows: Rows each request has in the logits (drafts, or 1 for a bonus or plain row).
        greedy: Requests at temperature 0, which eta never touches.
        device: Of the logits.

    Returns:
        ``(epsilon, alpha)``, each [sum(num_rows)] float32, for :func:`apply_eta`.
    """
    epsilon = [0.0 if o is None or g else o.epsilon for o, g in zip(options, greedy, strict=True)]
    alpha = [0.0 if o is None or o.alpha is None else o.alpha for o in options]
    repeats = torch.tensor(num_rows, dtype=torch.int64)
    return _uploaded(epsilon, repeats, device), _uploaded(alpha, repeats, device)


def warm_up() -> None:
    """Compile what a CPU runs (about a second on a cold cache) before the first request."""
    apply_eta(torch.zeros(1, 4), torch.full((1,), 0.1))


def _uploaded(values: Sequence[float], repeats: Tensor, device: torch.device | str) -> Tensor:
    """[sum(repeats)] float32; nobody waits for what the device does until then."""
    rows = torch.tensor(values, dtype=torch.float32).repeat_interleave(repeats)
    if torch.device(device).type == "cuda":
        rows = rows.pin_memory()
    return rows.to(device, non_blocking=True)
