# SPDX-License-Identifier: Apache-2.0
"""Loads DFlash drafters by vLLM's own loader, so that their layers are layers of the engine.

As in :mod:`.eagle_loading`; what a drafter has beyond DFlash is read here.
"""

from typing import TYPE_CHECKING

import torch

from vllm_spec_ext.engine.models.dflash_checkpoint import DFlashFacts, extras_file
from vllm_spec_ext.engine.models.eagle_loading import eagle_vllm_config, share_layers
from vllm_spec_ext.engine.models.loading import load_module
from vllm_spec_ext.engine.models.paged_blocks import PagedBlocks
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.nar.extras import SlotExtras
from vllm_spec_ext.proposers.nar.layout import EXTRAS_NAME

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.vllm import VllmConfig


def load_dflash(
    vllm_config: "VllmConfig",
    model_config: "ModelConfig",
    facts: DFlashFacts,
    index: int,
    target: torch.nn.Module,
    device: torch.device,
    layers: tuple[int, ...],
) -> PagedBlocks:
    """Load one drafter.

    Args:
        vllm_config: The engine's.
        model_config: The drafter's own, made by the front end.
        facts: What its checkpoint says.
        index: Of the model, for the names of its layers.
        target: With its weights.
        device: Of the target.
        layers: Of the target, whose states it reads.
    """
    own = eagle_vllm_config(vllm_config, model_config)
    module, names = load_module(own, model_config, index)
    share_layers(module, target)
    extras = load_extras(facts, model_config.model).to(device)
    size = vllm_config.model_config.get_vocab_size()
    return PagedBlocks(module, own, names, device, layers, extras, target, size)


def load_extras(facts: DFlashFacts, model: str) -> SlotExtras:
    """What a checkpoint has beyond DFlash; float32 on the CPU.

    Raises:
        SpecExtError: The file is gone, or holds values that are not finite.
    """
    extras = SlotExtras(facts.nar, facts.block_size - 1, facts.hidden_size)
    if facts.nar.has_tensors:
        from safetensors.torch import load_file

        file = extras_file(model)
        if file is None:  # it was there when dflash_checks.py looked
            raise SpecExtError(f"found no {EXTRAS_NAME} in {model} any more")
        found = load_file(file)
        for name, value in found.items():
            if not bool(value.isfinite().all()):
                raise SpecExtError(
                    f"{file}: {name} holds values that are not finite; download it again, or use "
                    "another checkpoint"
                )
        extras.load_state_dict(found)
    extras.requires_grad_(False)
    return extras
