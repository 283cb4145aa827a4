# SPDX-License-Identifier: Apache-2.0
"""Which heads and units of a target to keep: those that add most to the residual stream.

A unit's score is the root mean square of its activation on real text times the norm of its column
in the matrix that leads back to the residual stream; a group of heads scores as its columns do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.draft.cut import Picked, head_size, heads_per_group, layer_list

_ATTENTION, _FFN = "self_attn.o_proj", "mlp.down_proj"


def pick_kv_heads(
    model: Any, layers: Sequence[int], num_heads: int, run: Callable[[], None]
) -> Picked:
    """KV heads to keep in each of these layers, so that ``num_heads`` attention heads remain.

    Args:
        model: The target.
        layers: Its layers that are kept.
        num_heads: Attention heads to keep.
        run: Passes text through the model.

    Raises:
        SpecExtError: Not whole groups, more than there are, or another layout.
    """
    group, most = heads_per_group(model.config), int(model.config.num_attention_heads)
    if num_heads > most or num_heads % group:
        raise SpecExtError(
            f"--attention-heads {num_heads}: expected a multiple of {group} (heads that share a KV "
            f"head), at most {most}"
        )
    size = head_size(model.config) * group
    scores = _column_scores(model, layers, _ATTENTION, run)
    return tuple(_best(each.square().view(-1, size).sum(1), num_heads // group) for each in scores)


def pick_units(model: Any, layers: Sequence[int], count: int, run: Callable[[], None]) -> Picked:
    """Units of the feed-forward network to keep; arguments and errors as :func:`pick_kv_heads`."""
    scores = _column_scores(model, layers, _FFN, run)
    if count > len(scores[0]):
        raise SpecExtError(f"--ffn {count}: the target has {len(scores[0])}; give at most that")
    return tuple(_best(each, count) for each in scores)


def _best(scores: Tensor, count: int) -> tuple[int, ...]:
    return tuple(sorted(torch.topk(scores, count).indices.tolist()))


def _column_scores(
    model: Any, layers: Sequence[int], name: str, run: Callable[[], None]
) -> list[Tensor]:
    """Score of each input of a matrix, for each layer: [columns] float32 on the CPU."""
    _, blocks = layer_list(model, int(model.config.num_hidden_layers))
    try:
        matrices = [blocks[layer].get_submodule(name) for layer in layers]
    except AttributeError as error:
        raise SpecExtError(
            f"{type(model).__name__} has no {name} in its layers ({error}), so its heads and units "
            "cannot be told apart; cut layers only"
        ) from error
    sums: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        energy = inputs[0].detach().float().square().flatten(0, -2).sum(0)
        sums[module] = sums[module] + energy if module in sums else energy

    hooks = [matrix.register_forward_pre_hook(note) for matrix in matrices]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    scores = []
    for matrix in matrices:
        weight: Any = matrix.weight
        scores.append((sums[matrix].sqrt() * weight.detach().float().norm(dim=0)).cpu())
    return scores
