# SPDX-License-Identifier: Apache-2.0
"""Training a finished drafter further: its shape is kept, its weights are where training starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.nar.layout import CONFIG_NAME, FILES
from vllm_spec_ext.tensor_files import check_all_readable
from vllm_spec_ext.training.nar.model import DrafterConfig, NarDrafter
from vllm_spec_ext.training.nar.schema import NarTraining
from vllm_spec_ext.training.target import Target


def read_drafter(folder: Path) -> NarDrafter:
    """A finished drafter, on the CPU.

    Raises:
        SpecExtError: There is none, or its files do not belong together.
    """
    from safetensors import SafetensorError

    check_all_readable(folder, FILES)
    if not (folder / CONFIG_NAME).is_file():
        raise SpecExtError(
            f"{folder} holds no {CONFIG_NAME}; expected the folder of a finished drafter, as "
            "`vllm-spec train nar` writes it"
        )
    try:
        return NarDrafter.load(folder)
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise SpecExtError(
            f"{folder} is damaged, or no drafter of this kind ({type(error).__name__}: {error}); "
            "expected the weights of its layers in one file, without embeddings or a projection"
        ) from error


def with_shape_of(config: NarTraining, drafter: NarDrafter) -> NarTraining:
    """Settings that say what the drafter is, for all that reads them."""
    shape, nar = drafter.config, drafter.config.nar
    return config.model_copy(
        update={
            "slots": shape.num_slots,
            "layers": shape.num_hidden_layers,
            "ffn": shape.intermediate_size,
            "read_layers": list(shape.target_layer_ids),
            "copy_match": nar.copy_match,
            "selector_rank": nar.selector_rank,
            "draft_vocab": nar.draft_vocab_size,
            "causal": shape.causal,
        }
    )


def check_fits(
    shape: DrafterConfig, config: NarTraining, target: Target, fingerprint: str | None
) -> None:
    """Raise SpecExtError for a drafter of another target than this, with that tokenizer."""
    own = shape.target_hidden_size or shape.hidden_size
    for what, found, expected in (
        ("hidden_size", own, target.hidden_size),
        ("vocab_size", shape.vocab_size, target.vocab_size),
        ("num_target_layers", shape.num_target_layers, target.num_layers),
        ("tokenizer_fingerprint", shape.nar.tokenizer_fingerprint, fingerprint),
    ):
        if None not in (found, expected) and found != expected:
            raise SpecExtError(
                f"{config.start_from} has {what} {found}, and {config.shown_target} {expected}; "
                "give the target that the drafter was trained for"
            )


def take_weights(drafter: NarDrafter, trained: NarDrafter, scales: torch.Tensor) -> None:
    """Start with its weights, and read states that are divided by ``scales``; in place."""
    drafter.load_state_dict(trained.state_dict())
    with torch.no_grad():
        drafter.fc.weight *= scales


def further_config(trained: DrafterConfig, facts: dict[str, Any]) -> DrafterConfig:
    """The drafter's shape, and what is told of this training; of former ones their data."""
    former = trained.nar.training
    before = [*former.get("before", []), *([former["data"]] if "data" in former else [])]
    told = {**facts, "warm_start": former.get("warm_start", False)}
    if before:
        told["before"] = before
    return replace(trained, nar=trained.nar.model_copy(update={"training": told}))
