# SPDX-License-Identifier: Apache-2.0
"""The target's embedding and vocabulary projection, read alone from its checkpoint.

A trainer beside an engine has no memory for a second target, and heads need nothing else of it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vllm_spec_ext.errors import SpecExtError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


# Settings of models that scale or cap their logits, and the value that changes nothing.
_BEHIND_PROJECTION = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


class TargetEnds:
    """Both ends of a Hugging Face causal LM, in float32."""

    def __init__(self, embedding: Tensor, projection: Tensor, bias: Tensor | None = None) -> None:
        """Keep the matrices.

        Args:
            embedding: [vocab, hidden_size].
            projection: [vocab, hidden_size]; may be the same.
            bias: [vocab] of the projection.
        """
        self.embedding, self.projection, self.bias = embedding, projection, bias

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., hidden_size] of token ids."""
        return functional.embedding(token_ids, self.embedding)

    def rows(self, token_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Projection and bias onto these tokens alone; None = onto all."""
        if token_ids is None:
            return self.projection, self.bias
        ids = token_ids.long()
        return self.projection[ids].contiguous(), None if self.bias is None else self.bias[ids]


def check_target(model: str, config: Any) -> None:
    """Refuse a target past which nothing can be trained.

    Args:
        model: Its name.
        config: Its configuration, of `transformers` or as vLLM has it.

    Raises:
        SpecExtError: It is no causal language model, or its logits are not those of its projection.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise SpecExtError(
            f"the target {model!r} is of the type {config.model_type!r}, expected one that "
            "transformers loads as a causal language model: online training reads its embedding "
            "and projection so. Leave online out"
        )
    text = config.get_text_config()
    for name, neutral in _BEHIND_PROJECTION.items():
        value = getattr(text, name, None)
        if value not in (None, neutral):
            raise SpecExtError(
                f"the target {model!r} has {name}={value}, expected {neutral}: it changes logits "
                "behind its projection, and a drafter that is trained past that learns another "
                "distribution. Leave online out"
            )


def read_ends(model: str, device: torch.device) -> TargetEnds:
    """Both ends of a model in a folder or in the local cache of the Hugging Face Hub.

    Raises:
        SpecExtError: They are not there as plain matrices in safetensors files, or as of
            :func:`check_target`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise SpecExtError(
            f"cannot read the configuration of the target {model!r}: {error}"
        ) from error
    check_target(model, config)
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)
    head, table = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    if head is None or table is None:
        raise SpecExtError(f"the target {model!r} has no embedding or no vocabulary projection")
    names: dict[int, list[str]] = {}  # a matrix that is both has two
    for name, value in skeleton.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    folder = _local_folder(model)

    def read(value: Tensor) -> Tensor:
        for name in names[id(value)]:
            found = _read(folder, name)
            if found is not None and found.shape == value.shape:
                return found.to(device, torch.float32)
        raise SpecExtError(
            f"{folder} holds no {' or '.join(names[id(value)])} of shape {list(value.shape)} as "
            "plain numbers in safetensors files; online training of heads reads it from there. "
            "Quantised targets and GGUF cannot be trained for"
        )

    embedding = read(table.weight)
    projection = embedding if tied else read(head.weight)
    bias = getattr(head, "bias", None)
    return TargetEnds(embedding, projection, None if bias is None else read(bias))


def where_it_is(model: str, revision: str | None, cache: str | None) -> str:
    """Name or folder from which a trainer reads the weights that an engine has loaded.

    Args:
        model: The engine's name of it.
        revision: On the Hugging Face Hub; None = the newest.
        cache: Where it was downloaded to; None = where all models are.
    """
    if (revision is None and cache is None) or Path(model).expanduser().is_dir():
        return model
    from huggingface_hub import snapshot_download

    try:  # it is there: the engine has read it
        return snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
    except Exception:  # read from elsewhere than the Hub
        return model


def _local_folder(model: str) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:
        raise SpecExtError(
            f"the target {model!r} is neither a folder here nor readable from the Hugging Face Hub "
            f"({type(error).__name__}: {error})"
        ) from error


def _read(folder: Path, name: str) -> Tensor | None:
    from safetensors import safe_open

    file = folder / _SINGLE
    if (folder / _INDEX).is_file():
        places = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        if name not in places:
            return None
        file = folder / places[name]
    if not file.is_file():
        return None
    with safe_open(str(file), framework="pt") as tensors:
        if name not in tensors.keys():  # noqa: SIM118 (not a mapping)
            return None
        found: Tensor = tensors.get_tensor(name)
        return found if found.is_floating_point() and found.ndim in (1, 2) else None
