# SPDX-License-Identifier: Apache-2.0
"""Settings of ``vllm-spec train draft``: the draft model's own beside those of every method."""

import os
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from vllm_spec_ext.training.schema import FREE_TO_CHANGE as ALWAYS_FREE
from vllm_spec_ext.training.schema import Training


class DraftTraining(Training):
    """Settings of ``vllm-spec train draft``."""

    product: ClassVar[str] = "drafts"

    # Shape
    layers: int | None = Field(default=None, ge=1)
    """Layers of the draft model: the target's first ones. Latency follows depth, so try few first.
    [default: 2]"""

    keep_layers: list[int] | None = Field(default=None, min_length=1)
    """Which of the target's layers to keep instead, counted from 0, e.g. ``0 1 29``."""

    attention_heads: int | None = Field(default=None, ge=1)
    """Attention heads to keep in each layer, the most important ones on the training data, whole
    groups that share a KV head. Default: all."""

    ffn: int | None = Field(default=None, ge=1)
    """Hidden units to keep in each feed-forward network, the most important ones on the training
    data. Default: all."""

    vocab: int | None = Field(default=None, ge=2)
    """Keep only the tokens with ids below this. Ids of BPE tokenizers are ordered by merges, so
    low ids are frequent; the run prints how much of the target's text they cover. The vocabulary
    projection is most of a shallow model's cost. Default: all tokens."""

    # Optimisation
    learning_rate: float = Field(default=5e-4, gt=0.0, allow_inf_nan=False)
    """Peak learning rate of what is trained."""

    fit: int = Field(default=256, ge=0)
    """Training texts on which the last layer is fitted to the target's final states before the
    first step, in closed form; 0 = start with the target's own last layer."""

    loss: Literal["kl", "answers"] = "kl"
    """Learn the target's distribution at each position (forward KL), or only the tokens of its
    answers (cross-entropy), which takes no pass of the target."""

    top: int = Field(default=0, ge=0)
    """Compare the distributions on the target's this many best tokens and on all others together;
    0 = on the whole vocabulary. Has no meaning for ``answers``."""

    train_embeddings: bool = False
    """Train the embeddings and the vocabulary projection, too. They are most of a shallow model;
    with little data they are better left as the target has them."""

    # Boosting
    boost_on: list[Path] = Field(default_factory=list)
    """Folders of earlier drafts that this one is to complement, as SpecInfer's adaptive boosting:
    it learns mostly from positions where all of them are wrong."""

    boost_keep: float = Field(default=0.1, ge=0.0, le=1.0)
    """Weight of a position where an earlier draft is right, beside 1 where all are wrong; 0 leaves
    such positions out."""

    # Evaluation
    chain: int = Field(default=4, ge=1, le=64)
    """Tokens of the draft chains measured on held-out answers."""

    @field_validator("boost_on", "keep_layers", mode="before")
    @classmethod
    def _list_of_one_draft(cls, given: Any) -> Any:
        return [given] if isinstance(given, str | Path | int) else given

    @field_validator("boost_on")
    @classmethod
    def _expand_homes(cls, paths: list[Path]) -> list[Path]:
        return [Path(os.path.expanduser(path)) for path in paths]

    @property
    def kept_folders(self) -> list[tuple[str, Path]]:
        """The earlier drafts, too: a draft that complements others is used beside them.

        And prompt files: all of the former folder goes.
        """
        earlier = [("--boost-on", folder) for folder in self.boost_on]
        return [*super().kept_folders, *earlier, *(("--prompts", path) for path in self.prompts)]

    @model_validator(mode="after")
    def _check_draft(self) -> Self:
        if self.layers is not None and self.keep_layers is not None:
            raise ValueError("layers and keep_layers both choose layers; drop one")
        if self.loss == "answers" and self.top:
            raise ValueError(
                "top shortens the target's distribution, which loss='answers' does "
                "not use; drop one"
            )
        return self


FREE_TO_CHANGE = ALWAYS_FREE | {"chain"}
