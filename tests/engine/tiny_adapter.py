# SPDX-License-Identifier: Apache-2.0
"""A random LoRA adapter for the tiny model, in the format of PEFT."""

import json
from pathlib import Path

import torch

RANK = 8
NUM_LAYERS = 3
SHAPES = {  # module -> part, inputs, outputs
    "q_proj": ("self_attn", 128, 128),
    "v_proj": ("self_attn", 128, 64),
    "o_proj": ("self_attn", 128, 128),
    "down_proj": ("mlp", 256, 128),
}


def build_tiny_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter strong enough to change what the model says.

    Args:
        folder: Where to; made if missing.
        seed: Of the random weights.

    Returns:
        The folder.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(NUM_LAYERS):
        for name, (part, inputs, outputs) in SHAPES.items():
            base = f"base_model.model.model.layers.{layer}.{part}.{name}"
            for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                weights[f"{base}.lora_{side}.weight"] = (
                    torch.randn(shape, generator=generator) * 0.2
                )
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(SHAPES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
