# SPDX-License-Identifier: Apache-2.0
"""First weights of a drafter: scales that fit the target, and with a warm start its last layers."""

import math

import torch
from torch import Tensor, nn

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.nar.model import Attention, NarDrafter
from vllm_spec_ext.training.target import Target

_NORMS = ("input_layernorm", "post_attention_layernorm")
_MATRICES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def state_scales(states: Tensor) -> Tensor:
    """[width] float32 root mean square of each unit of the states [n, width].

    Layers differ in size by orders of magnitude, and so do units. A drafter is trained on states
    that are divided by these; :func:`fold_scales` puts them into its first matrix.
    """
    return states.float().square().mean(0).sqrt().clamp(min=1e-6)


def fold_scales(drafter: NarDrafter, scales: Tensor) -> None:
    """Make a drafter that reads divided states read the states themselves; in place."""
    with torch.no_grad():
        drafter.fc.weight /= scales


def set_first_weights(drafter: NarDrafter, target: Target, final: Tensor) -> None:
    """Start in the target's scales.

    Args:
        drafter: With torch's own random weights.
        target: Whose embeddings and projection it uses.
        final: [n, hidden] some final states of the target: what the projection is used to.
    """
    ids = torch.arange(0, target.vocab_size, max(1, target.vocab_size // 4096))
    embedding = target.embed(ids.to(target.device)).float()
    size = embedding.square().mean().sqrt()
    units = final.float().square().mean(0).sqrt()
    with torch.no_grad():
        # Of the target's own size, states of random direction have logits of any size.
        logits = target.project(torch.randn(64, len(units), device=units.device) * units).float()
        drafter.norm.weight.copy_(units / logits.std())
        if drafter.config.own_mask_embedding:
            drafter.mask_embedding.copy_(embedding.mean(0))
        if drafter.extras.guesses is not None:
            drafter.extras.guesses.shown.fill_(float(size))
        if drafter.config.nar.slot_queries:
            drafter.extras.slot_queries.normal_().mul_(size)


def copy_last_layers(drafter: NarDrafter, target: Target, scales: Tensor) -> None:
    """Start from the target's last layers, which make states that its projection can read.

    The drafter reads the output of the target's last layer first, as the first of these layers
    reads the stream that it knows. Norms of queries and keys, which the target may lack, start with
    the scale that its projections have.

    Raises:
        SpecExtError: The target's layers are not laid out as in Llama, or have other sizes.
    """
    count = drafter.config.num_hidden_layers
    theirs = target.layer_list()[-count:]
    if len(theirs) < count:
        raise SpecExtError(
            f"--warm-start: {target.name} has {len(theirs)} layers, the drafter {count}; "
            f"give --layers {len(theirs)} or less"
        )
    with torch.no_grad():
        for mine, layer in zip(drafter.layers, theirs, strict=True):
            _check_norm(layer.get_submodule(_NORMS[0]), target)
            for name in (*_NORMS, *_MATRICES):
                _copy(mine.get_submodule(name), layer, name, target)
            assert isinstance(mine.self_attn, Attention)
            norm = layer.get_parameter("input_layernorm.weight")
            for kind in "qk":
                own = getattr(mine.self_attn, f"{kind}_norm").weight
                weight = getattr(mine.self_attn, f"{kind}_proj").weight
                try:
                    own.copy_(layer.get_parameter(f"self_attn.{kind}_norm.weight"))
                except AttributeError:
                    # Mean square of one unit of a projection of rows of unit mean square.
                    own.fill_(math.sqrt(float((weight * norm).square().sum(1).mean())))
        last = getattr(target.model.base_model, "norm", None)
        if last is not None:  # else the scale of a cold start
            drafter.norm.weight.copy_(last.weight)
        drafter.hidden_norm.weight.copy_(theirs[0].get_parameter("input_layernorm.weight"))
        hidden = drafter.config.hidden_size
        drafter.fc.weight.mul_(0.01)
        drafter.fc.weight[:, -hidden:] += torch.diag(scales[-hidden:])


def _check_norm(norm: nn.Module, target: Target) -> None:
    """Raise SpecExtError for one that does not multiply by its weight, as Gemma's."""
    weight = norm.get_parameter("weight")
    probe = torch.linspace(-1.0, 2.0, len(weight), device=weight.device, dtype=weight.dtype)
    expected = probe.float() * torch.rsqrt(probe.float().square().mean()) * weight.float()
    if not torch.allclose(norm(probe[None])[0].float(), expected, rtol=0.05, atol=0.01):
        raise SpecExtError(
            f"--warm-start: norms of {target.name} scale in another way than by their weights "
            f"({type(norm).__name__}), expected RMS norms as in Llama; drop the flag"
        )


def _copy(mine: nn.Module, layer: nn.Module, name: str, target: Target) -> None:
    try:
        value = layer.get_parameter(f"{name}.weight")
        getattr(mine, "weight").copy_(value)  # noqa: B009  (mypy knows no weight of a Module)
    except (AttributeError, RuntimeError) as error:
        raise SpecExtError(
            f"--warm-start: layers of {target.name} have no fitting {name} ({error}); drop the flag"
        ) from error
