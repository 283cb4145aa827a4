# SPDX-License-Identifier: Apache-2.0
"""Writing a finished draft: a standard Hugging Face folder, and what was measured."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from vllm_spec_ext.atomic import (
    disk_full_named,
    replace_folder,
    write_bytes,
    write_json,
)
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.draft.cut_tokenizer import cut_tokenizer
from vllm_spec_ext.training.draft.evaluate import DraftFigures
from vllm_spec_ext.training.earlier_result import CARD_NAME, check_earlier_result

FACTS_NAME = "training.json"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def save_draft(
    folder: Path,
    model: Any,
    tokenizer: Any,
    vocab: int | None,
    dtype: str,
    facts: dict[str, Any],
    figures: DraftFigures,
) -> int:
    """Write the folder that vLLM and transformers load; a former one is replaced as a whole.

    Args:
        folder: Where to.
        model: Hugging Face model.
        tokenizer: The target's tokenizer; None = it has none.
        vocab: Ids that the draft keeps; None = all.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        facts: What made the draft.
        figures: Measured on held-out answers.

    Returns:
        Bytes of all files written.

    Raises:
        SpecExtError: A weight is not finite in that format, the tokenizer cannot be cut, or the
            folder holds something that is not a draft; nothing is changed.
        DiskFullError: The former folder stands.
    """
    check_replaceable(folder)
    folder = folder.resolve()  # what a link leads to is replaced, and not the link
    saved = copy.deepcopy(model).to("cpu", _DTYPES[dtype])
    for name, value in saved.named_parameters():
        if not bool(torch.isfinite(value).all()):
            raise SpecExtError(
                f"{name} of the draft holds values that are not finite in {dtype}, and no server "
                f"would load them; {folder} is as before. Train again with a lower --learning-rate"
                + (", or use --save-dtype bf16" if dtype == "fp16" else "")
            )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk_full_named(folder):
            saved.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
                if vocab is not None:
                    cut_tokenizer(partial, vocab)
            write_json(partial / FACTS_NAME, {**facts, "figures": figures.as_dict()})
            write_bytes(partial / CARD_NAME, model_card(facts, figures, vocab).encode())
            size = sum(file.stat().st_size for file in partial.iterdir())
        replace_folder(partial, folder)
    finally:  # half a model only takes the space that is missing
        shutil.rmtree(partial, ignore_errors=True)
    return size


def check_replaceable(folder: Path) -> None:
    """Raise SpecExtError for a folder with files that no run of this trainer wrote.

    And for one that no folder can take the place of.
    """
    if os.path.ismount(os.path.realpath(folder)):  # a link to a folder is none
        raise SpecExtError(
            f"{folder} is a mount point, which no other folder can replace; give one within it, "
            f"for example --out {folder / 'draft'}"
        )
    check_earlier_result(folder, FACTS_NAME, "draft")


def model_card(facts: dict[str, Any], figures: DraftFigures, vocab: int | None) -> str:
    """README of a draft folder."""
    depths = "\n".join(
        f"| {i} | {share:.3f} |" for i, share in enumerate(figures.acceptance_per_position, start=1)
    )
    data = "\n".join(f"- {name}: {value}" for name, value in facts["data"].items())
    cut = facts["cut"]
    words = f"layers {', '.join(map(str, cut['layers']))} of the target"
    if "kv_heads" in cut:
        words += f", {len(cut['kv_heads'][0])} KV heads"
    if "units" in cut:
        words += f", {len(cut['units'][0])} units in the feed-forward network"
    extra = ""
    if vocab is not None:
        words += f", the {vocab:,} tokens with the lowest ids"
        extra = ', "use_heterogeneous_vocab": true'
    merged = "".join(f"- {name}: {value:.3f}\n" for name, value in figures.merged.items())
    together = f"\nTogether with {', '.join(facts['boost_on'])}:\n\n{merged}" if merged else ""
    return f"""---
tags: [speculative-decoding, draft-model]
---
# Draft model for {facts["target"]}

Cut from the target ({words}) and distilled on its answers; {facts["num_parameters"]:,} parameters.

```
vllm serve {facts["target"]} --speculative-config \\
  '{{"method": "draft_model", "model": "FOLDER", "num_speculative_tokens": {figures.chain}{extra}}}'
```

## Held-out answers ({figures.num_sequences} sequences, {figures.num_positions} positions)

Tokens per target step: **{figures.acceptance_length:.2f}** with chains of {figures.chain} \
(greedy, teacher forcing, bonus token included). The greedy guess is right at \
{figures.accuracy["top1"]:.1%} of the positions; the draft's vocabulary holds \
{figures.vocab_coverage:.1%} of the tokens; a token drawn at temperature 1 is accepted with \
{figures.overlap:.1%}. The target itself predicts {figures.target_agreement:.1%} of the text.

| token of the chain | accepted |
| --- | --- |
{depths}
{together}
## Training data

{data}
"""
