# SPDX-License-Identifier: Apache-2.0
"""A first fit of the last layer in closed form, before any step of training.

After a cut the last layer gets another residual stream than it knows, and the draft's first guesses
are worse than chance. But its final state is ``norm(r + W a)``, with r the stream before its
feed-forward network, a the network's hidden units and W its way back: linear in W. So W is solved
for, by ridge regression to the target's own final states. A norm forgets lengths, so the length
that the stream is to have is free; it is chosen on texts kept apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_spec_ext.training.draft.cut import layer_list
from vllm_spec_ext.training.target import Target

_RIDGES = (1e-4, 1e-3, 1e-2)  # of the mean diagonal
_LENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)  # of the stream's median length


@dataclass(frozen=True)
class FitBatch:
    """Texts, and the states that the draft is to have at some of their positions."""

    token_ids: Tensor  # [batch, length] int64, as the draft reads them
    mask: Tensor  # [batch, length] int64
    rows: Tensor  # [n] int64
    columns: Tensor  # [n] int64
    wanted: Tensor  # [n, hidden_size] final states of the target
    weights: Tensor  # [n] float32


@dataclass(frozen=True)
class _Seen:
    units: Tensor  # [n, units] float32, a
    stream: Tensor  # [n, hidden_size] float32, r
    wanted: Tensor  # [n, hidden_size] float32
    weights: Tensor  # [n, 1] float32


def fit_last_layer(
    draft: Target, batches: Iterable[FitBatch], apart: FitBatch
) -> tuple[float, float] | None:
    """Solve for the last layer's ``mlp.down_proj``; it stays as it is if that is no better.

    Args:
        draft: A draft as wide as its target.
        batches: To fit to.
        apart: To choose the strength of the ridge and the length of the stream on.

    Returns:
        Relative squared error of the final states ``apart``, before and after; None for layers
        without a feed-forward network as in Llama.
    """
    config = draft.model.config.get_text_config()
    _, layers = layer_list(draft.model, int(config.num_hidden_layers))
    last: Any = layers[-1]
    try:
        back: Any = last.get_submodule("mlp.down_proj")
        norm: Any = draft.model.base_model.get_submodule("norm")
    except AttributeError:
        return None
    if back.bias is not None:
        return None
    with torch.no_grad():
        # A norm of root mean squares gives its gains for a stream of ones.
        gains = norm(torch.ones(1, draft.hidden_size, device=draft.device))[0].float()
        gains = torch.where(gains.abs() < 1e-6, 1e-6, gains)
        size = back.in_features
        exact = torch.float32 if draft.device.type == "mps" else torch.float64  # which lacks it
        gram = torch.zeros(size, size, dtype=exact, device=draft.device)
        onto_stream = torch.zeros(size, draft.hidden_size, dtype=exact, device=draft.device)
        onto_wanted = torch.zeros_like(onto_stream)
        for batch in batches:
            seen = _look(draft, last, back, batch)
            weighted = (seen.units * seen.weights).T
            gram += weighted @ seen.units  # of one batch exact enough in float32
            onto_stream += weighted @ seen.stream
            onto_wanted += weighted @ (seen.wanted / gains)
        test = _look(draft, last, back, apart)
        before = _error(test, back.weight.float().T, norm)
        found, best = before, None
        length = test.stream.square().mean(1).sqrt().median()
        mean = gram.diagonal().mean().clamp(min=1e-12)
        eye = torch.eye(size, dtype=exact, device=draft.device)
        for ridge in _RIDGES:
            factor = torch.linalg.cholesky(gram + ridge * mean * eye)
            cancel, aim = (torch.cholesky_solve(x, factor) for x in (onto_stream, onto_wanted))
            for scale in _LENGTHS:
                weight = (scale * length * aim - cancel).float()
                error = _error(test, weight, norm)
                if error < found:
                    found, best = error, weight
        if best is not None:
            former = back.weight.clone()
            back.weight.copy_(best.T)
            # Some layers do more with the product than to add it (Gemma 3 norms it).
            found = _error(_look(draft, last, back, apart), back.weight.float().T, norm)
            if not found < before:
                back.weight.copy_(former)
                found = before
    return before, found


def _look(draft: Target, last: Any, back: Any, batch: FitBatch) -> _Seen:
    kept: dict[str, Tensor] = {}

    def note(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept["units"], kept["added"] = inputs[0], output

    def note_layer(module: Any, inputs: Any, output: Any) -> None:
        kept["stream"] = output[0] if isinstance(output, tuple) else output

    hooks = [back.register_forward_hook(note), last.register_forward_hook(note_layer)]
    try:
        draft.hidden(batch.token_ids, batch.mask)
    finally:
        for hook in hooks:
            hook.remove()
    at = (batch.rows, batch.columns)
    return _Seen(
        kept["units"][at].float(),
        (kept["stream"][at] - kept["added"][at]).float(),
        batch.wanted.float(),
        batch.weights[:, None],
    )


def _error(seen: _Seen, weight: Tensor, norm: Any) -> float:
    wrong = (norm(seen.stream + seen.units @ weight) - seen.wanted).square().sum(1, keepdim=True)
    whole = seen.wanted.square().sum(1, keepdim=True)
    return float((wrong * seen.weights).sum() / (whole * seen.weights).sum().clamp(min=1e-12))
