# SPDX-License-Identifier: Apache-2.0
"""Loads EAGLE-3 heads by vLLM's own loader, so that their layer is a layer of the engine.

As in :mod:`.loading`; but such a head is built for a target, whose configuration it reads, and may
leave its embeddings or its output projection to it (vLLM 0.32 ``SpecDecodeBaseProposer``).
"""

from copy import copy
from typing import TYPE_CHECKING

import torch

from vllm_spec_ext.engine.models.loading import draft_attention, load_module
from vllm_spec_ext.engine.models.paged_eagle import PagedEagle
from vllm_spec_ext.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.vllm import VllmConfig


def eagle_vllm_config(vllm_config: "VllmConfig", model_config: "ModelConfig") -> "VllmConfig":
    """The engine's configuration with a head as its drafter, as its class expects it."""
    speculative = copy(vllm_config.speculative_config)
    assert speculative is not None
    speculative.draft_model_config = model_config
    own = copy(vllm_config)  # made anew it would be checked for its method
    own.speculative_config = speculative
    own.attention_config = draft_attention(vllm_config.attention_config)
    own.lora_config = None
    return own


def load_eagle3(
    vllm_config: "VllmConfig",
    model_config: "ModelConfig",
    index: int,
    target: torch.nn.Module,
    device: torch.device,
    layers: tuple[int, ...],
) -> PagedEagle:
    """Load one head.

    Args:
        vllm_config: The engine's.
        model_config: The head's own, made by the front end.
        index: Of the model, for the names of its layers.
        target: With its weights.
        device: Of the target.
        layers: Of the target, whose states the head reads.
    """
    own = eagle_vllm_config(vllm_config, model_config)
    module, names = load_module(own, model_config, index)
    share_layers(module, target)
    return PagedEagle(module, own, names, device, layers)


def share_layers(head: torch.nn.Module, target: torch.nn.Module) -> None:
    """Give a head the target's layers in place of those that its checkpoint lacks or repeats.

    (vLLM 0.32 ``SpecDecodeBaseProposer._maybe_share_embeddings``, ``_maybe_share_lm_head``.)
    """
    language = target.get_language_model() if hasattr(target, "get_language_model") else target
    if not head.has_own_lm_head:
        head.lm_head = _without_adapters(language.lm_head)
    embeddings = _without_adapters(getattr(language.model, "embed_tokens", None))
    if head.has_own_embed_tokens:
        ours: torch.Tensor | None = getattr(embeddings, "weight", None)
        own = head.model.embed_tokens.weight
        if ours is None or ours.shape != own.shape or not torch.equal(ours, own):
            return
    elif embeddings is None:
        raise UnsupportedError(
            "found no embeddings in an EAGLE-3 checkpoint, and none of a known name "
            f"(model.embed_tokens) in {type(target).__name__}; expected either. Use a checkpoint "
            "that has its own"
        )
    head.model.embed_tokens = embeddings


def _without_adapters(layer: torch.nn.Module | None) -> torch.nn.Module | None:
    """A layer of the target as it is without LoRA, whose rows are those of the target's step.

    (vLLM 0.32 ``v1/worker/gpu/spec_decode/eagle/utils.py``, ``maybe_share_target_embed``.)
    """
    found: torch.nn.Module | None = getattr(layer, "base_layer", layer)
    return found
