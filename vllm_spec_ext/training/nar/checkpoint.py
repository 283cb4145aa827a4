# SPDX-License-Identifier: Apache-2.0
"""Writing a finished drafter's folder: weights, config, and a README with what was measured."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_spec_ext.atomic import new_files, write_bytes
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.nar.layout import (
    CONFIG_NAME,
    EXTRAS_KEY,
    EXTRAS_NAME,
    MASK_NAME,
    WEIGHTS_NAME,
)
from vllm_spec_ext.training.earlier_result import CARD_NAME, check_earlier_result
from vllm_spec_ext.training.nar.evaluate import TOP, NarFigures
from vllm_spec_ext.training.nar.model import NarDrafter
from vllm_spec_ext.training.nar.start import fold_scales

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def finished(drafter: NarDrafter, scales: torch.Tensor) -> NarDrafter:
    """A copy that reads states as the target gives them; on the CPU, for inference."""
    made = NarDrafter(drafter.config)
    made.load_state_dict({n: v.detach().cpu() for n, v in drafter.state_dict().items()})
    fold_scales(made, scales.cpu())
    return made.eval().requires_grad_(False)


def save_drafter(
    folder: Path, drafter: NarDrafter, dtype: str, figures: NarFigures, facts: dict[str, Any]
) -> int:
    """Write the folder that ``{"method": "nar", "model": FOLDER}`` serves.

    Files take their places once all are written, ``config.json`` last: a folder without it is not
    taken for a drafter.

    Args:
        folder: Made if missing; files of a former run are replaced.
        drafter: What :func:`finished` returned.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        figures: Measured on held-out text.
        facts: Further figures for the README's readers.

    Returns:
        Bytes of all files written.

    Raises:
        SpecExtError: A weight is not finite in that format, or the folder holds files of something
            else; nothing is written.
        DiskFullError: Nothing has changed.
    """
    check_replaceable(folder)
    for name, value in drafter.state_dict().items():
        if not bool(torch.isfinite(value.to(_DTYPES[dtype])).all()):
            raise SpecExtError(
                f"{name} of the drafter holds values that are not finite in {dtype}, and no server "
                f"would load them; {folder} is as before. Train again with a lower --learning-rate"
                + (", or use --save-dtype bf16" if dtype == "fp16" else "")
            )
    nar = drafter.config.nar
    told = nar.model_copy(update={"training": {**nar.training, **figures.as_dict(), **facts}})
    saved = copy.copy(drafter)
    saved.config = replace(drafter.config, nar=told)
    # A former drafter may have had more files.
    with new_files(folder, CONFIG_NAME, (EXTRAS_NAME, MASK_NAME)) as made:
        write_bytes(made / CARD_NAME, model_card(saved, figures).encode())
        saved.save(made, _DTYPES[dtype])
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_replaceable(folder: Path) -> None:
    """Raise SpecExtError for a folder whose files would be replaced, and are no drafter of ours.

    Nor is a public DFlash checkpoint one: none of our keys is in its configuration.
    """
    check_earlier_result(
        folder,
        CONFIG_NAME,
        "block drafter",
        is_own=lambda config: EXTRAS_KEY in config,
        files=(CONFIG_NAME, WEIGHTS_NAME, CARD_NAME, EXTRAS_NAME, MASK_NAME),
    )


def model_card(drafter: NarDrafter, figures: NarFigures) -> str:
    """README of a drafter's folder."""
    config, told = drafter.config, drafter.config.nar.training
    target = told.get("target", "the target")
    rows = "\n".join(
        f"| {i + 1} | "
        + " | ".join(f"{slot[f'top{k}']:.3f}" for k in TOP)
        + f" | {figures.behind_right[i]:.3f} | {figures.accepted[i]:.3f} "
        f"| {figures.chain_lengths[i]:.2f} |"
        for i, slot in enumerate(figures.accuracy)
    )
    trees = "".join(
        f", **{length:.2f}** with trees of {nodes} nodes"
        for nodes, length in zip(figures.tree_nodes, figures.tree_acceptance_lengths, strict=True)
    )
    data = "\n".join(f"- {name}: {value}" for name, value in told.get("data", {}).items())
    for before in reversed(told.get("before", [])):
        lines = "\n".join(f"- {name}: {value}" for name, value in before.items())
        data += f"\n\nBefore that:\n\n{lines}"
    listed = config.nar.draft_vocab_size
    drafts = "" if listed is None else f", drafting the {listed:,} most frequent tokens"
    size = sum(p.numel() for p in drafter.parameters())
    layers = _number(config.num_hidden_layers, "layer")
    return f"""---
library_name: vllm-spec-ext
tags: [speculative-decoding, non-autoregressive, dflash]
---
# A block drafter for {target}

{_number(config.num_slots, "slot")}, {layers} over the hidden states of the target's \
layers {", ".join(map(str, config.target_layer_ids))}; {size:,} parameters{drafts}. Embeddings and \
vocabulary projection: the target's own.

```
vllm serve {target} --speculative-config \\
  '{{"method": "nar", "model": "FOLDER", "num_speculative_tokens": {config.num_slots}}}'
```

## Held-out text ({figures.num_sequences} sequences, {figures.num_positions} positions)

Tokens per target step: **{figures.acceptance_length:.2f}** with the chain\
{trees} (teacher forcing, bonus token included); {figures.without_selector:.2f} with the chain of \
each slot's best token. The target itself predicts {figures.target_agreement:.1%} of the text.

| slot | top 1 | top 2 | top 3 | top 5 | right behind right | accepted | tokens a step, chain |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

## Training data

{data or "- not recorded"}
"""


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count > 1 else "")
