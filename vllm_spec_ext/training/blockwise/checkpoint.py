# SPDX-License-Identifier: Apache-2.0
"""Writing a finished heads folder: weights, config, and a README with what was measured."""

from pathlib import Path

import torch

from vllm_spec_ext.atomic import new_files, write_bytes, write_json
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.blockwise.heads import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    BlockwiseHeads,
    HeadsConfig,
)
from vllm_spec_ext.training.blockwise.evaluate import TOP, HeadFigures
from vllm_spec_ext.training.earlier_result import CARD_NAME, check_earlier_result

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def default_head_width(
    hidden_size: int, num_heads: int, *, dense: bool, conditioned: bool, copying: bool
) -> int:
    """Widest hidden layer that keeps all heads' matrices within ``12 * hidden_size**2`` numbers.

    That is about one Transformer layer, so drafting costs less than a layer of the target, and
    8 MB in bf16 for a hidden size of 576. Rounded down to a multiple of 16, at least 16.
    """
    fan_in = 1 + conditioned + copying
    fan_out = num_heads if dense else 1
    width = 12 * hidden_size // (num_heads * (fan_in + fan_out))
    return max(16, width // 16 * 16)


def save_heads(
    folder: Path, config: HeadsConfig, heads: BlockwiseHeads, dtype: str, figures: HeadFigures
) -> int:
    """Write the folder that ``{"method": "blockwise", "model": FOLDER}`` serves.

    ``config.json`` comes last: a folder without it is not taken for heads.

    Args:
        folder: Made if missing; other files in it stay.
        config: Shape and target; its ``training`` is stored as it is.
        heads: The trained module.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        figures: Measured on held-out text.

    Returns:
        Bytes of all files written.

    Raises:
        SpecExtError: A weight is not finite in that format, or the folder holds files of something
            else; nothing is written.
        DiskFullError: All is as before.
    """
    from safetensors.torch import save

    check_replaceable(folder)
    weights = {
        name: value.detach()
        .to("cpu", _DTYPES[dtype] if value.is_floating_point() else value.dtype)
        .contiguous()
        for name, value in heads.state_dict().items()
    }
    for name, value in weights.items():
        if not bool(torch.isfinite(value).all()):
            raise SpecExtError(
                f"{name} of the heads holds values that are not finite in {dtype}, and no server "
                f"would load them; {folder} is as before. Train again with a lower --learning-rate"
                + (", or use --save-dtype bf16" if dtype == "fp16" else "")
            )
    config = config.model_copy(update={"training": {**config.training, **figures.as_dict()}})
    data = save(weights, metadata={"format": "pt"})
    readme = model_card(config, figures).encode()
    with new_files(folder, CONFIG_NAME) as made:
        write_bytes(made / WEIGHTS_NAME, data)
        write_bytes(made / CARD_NAME, readme)
        write_json(made / CONFIG_NAME, config.model_dump())
    return len(data) + len(readme) + (folder / CONFIG_NAME).stat().st_size


def check_replaceable(folder: Path) -> None:
    """Raise SpecExtError for a folder whose files would be replaced by heads, and are no heads."""
    own = HeadsConfig.model_fields["model_type"].default
    check_earlier_result(
        folder,
        CONFIG_NAME,
        "heads",
        is_own=lambda config: config.get("model_type") == own,
        files=(CONFIG_NAME, WEIGHTS_NAME, CARD_NAME),
    )


def model_card(config: HeadsConfig, figures: HeadFigures) -> str:
    """README of a heads folder."""
    rows = "\n".join(
        f"| {i + 1} | x[t+{i + 2}] | " + " | ".join(f"{head[f'top{k}']:.3f}" for k in TOP) + " |"
        for i, head in enumerate(figures.accuracy)
    )
    facts = "\n".join(
        f"- {name}: {value}" for name, value in config.training.get("data", {}).items()
    )
    changed = (
        "\n**The target was fine-tuned with these heads**: serve the model that was saved with "
        "them. It is not the original model, and its text differs.\n"
        if config.training.get("finetune")
        else ""
    )
    layout = "one private hidden layer each" if config.block_diagonal else "one shared hidden layer"
    seen = ["the next token"] if config.condition_on_next else []
    seen += ["what followed when the text's end occurred before"] if config.copy_match else []
    shown = f", shown {' and '.join(seen)}" if seen else ""
    listed = config.draft_vocab_size
    drafts = "" if listed is None else f", drafting the {listed:,} most frequent tokens"
    return f"""---
library_name: vllm-spec-ext
tags: [speculative-decoding, blockwise-parallel-decoding]
---
# Blockwise heads for {config.target}

{config.num_heads} draft heads (block size k = {config.block_size} with the target's own head), \
{layout} of {config.head_width} units a head{shown}; {config.num_parameters:,} parameters\
{drafts}. \
Vocabulary projection{" and embeddings" if seen else ""}: the target's own.
{changed}
```
vllm serve {config.target} --speculative-config \\
  '{{"method": "blockwise", "model": "FOLDER", "num_speculative_tokens": {config.num_heads}}}'
```

## Held-out text ({figures.num_sequences} sequences, {figures.num_positions} positions)

Tokens per target step: **{figures.acceptance_length:.2f}** with the chain, \
**{figures.tree_acceptance_length:.2f}** with trees of {figures.tree_nodes} nodes \
(teacher forcing, bonus token included). The target itself predicts \
{figures.target_agreement:.1%} of the text.

| head | predicts | top 1 | top 2 | top 3 | top 5 |
| --- | --- | --- | --- | --- | --- |
{rows}

## Training data

{facts or "- not recorded"}
"""
