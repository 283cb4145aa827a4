# SPDX-License-Identifier: Apache-2.0
"""Loads draft models by vLLM's own loader, so that their layers are layers of the engine.

A prefix keeps their names apart from the target's. Once in the static forward context they are
found by ``get_kv_cache_spec``, so vLLM itself counts their KV and puts them into the target's KV
group: one block table for all.
"""

from copy import copy
from typing import TYPE_CHECKING

import torch
from vllm.config.utils import replace
from vllm.model_executor.model_loader import get_model

from vllm_spec_ext.engine.models.kv_binding import BACKENDS
from vllm_spec_ext.engine.models.paged_model import PagedModel

if TYPE_CHECKING:
    from vllm.config.attention import AttentionConfig
    from vllm.config.model import ModelConfig
    from vllm.config.vllm import VllmConfig


def draft_vllm_config(vllm_config: "VllmConfig", model_config: "ModelConfig") -> "VllmConfig":
    """The engine's configuration with another model in it, as vLLM makes it for its drafters.

    (vLLM 0.32 ``DraftModelProposer._create_draft_vllm_config``.) The attention layers register in
    the same compilation configuration, which is therefore shared.
    """
    return replace(
        vllm_config,
        quant_config=None,  # the draft's own says it
        lora_config=None,
        # Making a VllmConfig writes whether its model is a mixture of experts there.
        parallel_config=copy(vllm_config.parallel_config),
        attention_config=draft_attention(vllm_config.attention_config),
        model_config=model_config,
    )


def draft_attention(theirs: "AttentionConfig") -> "AttentionConfig":
    """The engine's attention for a draft: on the backend that the user asked for, if drafts can.

    Else vLLM chooses one for it, as it does for its own drafters.
    """
    asked = theirs.backend
    is_kept = asked is not None and asked.name in BACKENDS
    return replace(theirs, backend=asked if is_kept else None)


def load(
    vllm_config: "VllmConfig", model_config: "ModelConfig", index: int, device: torch.device
) -> PagedModel:
    """Load one model.

    Args:
        vllm_config: The engine's.
        model_config: The draft's own, made by the front end.
        index: Of the model, for the names of its layers.
        device: Of the target.
    """
    own = draft_vllm_config(vllm_config, model_config)
    module, names = load_module(own, model_config, index)
    return PagedModel(module, own, names, device)


def load_module(
    own: "VllmConfig", model_config: "ModelConfig", index: int
) -> tuple[torch.nn.Module, list[str]]:
    """The module of a draft, and the names of its attention layers.

    Args:
        own: The engine's configuration as the draft's class expects it.
        model_config: The draft's.
        index: Of the model, for the names of its layers.
    """
    layers = own.compilation_config.static_forward_context  # the engine's
    before = set(layers)
    # vLLM reads the layer's number off its name, which may hold no other integer between dots.
    prefix = f"spec_ext_draft{index}x"
    module: torch.nn.Module = get_model(vllm_config=own, model_config=model_config, prefix=prefix)
    return module.eval(), [name for name in layers if name not in before]
