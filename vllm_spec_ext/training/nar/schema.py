# SPDX-License-Identifier: Apache-2.0
"""Settings of ``vllm-spec train nar``: the block drafter's own beside those of every method."""

import os
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from vllm_spec_ext.training.schema import FREE_TO_CHANGE as ALWAYS_FREE
from vllm_spec_ext.training.schema import Training

# Settings of a drafter's shape, and of how one is made.
SHAPE = frozenset(
    {
        *("slots", "layers", "ffn", "read_layers", "warm_start", "heads"),
        *("copy_match", "selector_rank", "draft_vocab", "causal"),
    }
)


class NarTraining(Training):
    """Settings of ``vllm-spec train nar``."""

    product: ClassVar[str] = "drafter weights"

    # The drafter
    start_from: Path | None = None
    """Train this finished drafter further, a former run's or a DFlash checkpoint of the target, on
    other texts or on more. It keeps its shape, so settings of the shape are not given with it."""

    slots: int = Field(default=6, ge=1, le=64)
    """Tokens that a block drafts; the checkpoint's ``block_size`` counts the last token, too."""

    layers: int = Field(default=2, ge=1, le=16)
    """Layers of the drafter."""

    ffn: int | None = Field(default=None, ge=1, le=1 << 20)
    """Units of each feed-forward network. Default: 16/9 of the hidden size, to the next multiple of
    64; with ``warm_start`` the target's."""

    read_layers: list[int] | None = None
    """Layers of the target, counted from 0, whose outputs the drafter reads. Default: three, a
    third and two thirds up, and the last."""

    warm_start: bool = False
    """Start from the target's last layers; where the layers are laid out as in Llama."""

    heads: Path | None = None
    """Start from these heads of the method ``blockwise``, trained on the same target: the first
    slots begin with what they guess, and the layers learn what is wrong in it. A short training
    does more with them than without. They become part of the drafter and are trained along."""

    copy_match: int = Field(default=8, ge=0, le=64)
    """Show the slots the tokens that followed the latest place where the end of the text occurred
    before, compared over up to this many tokens; 0 = masks alone."""

    selector_rank: int = Field(default=64, ge=0, le=4096)
    """Rank of the selector, which scores each pair of neighbouring candidates; 0 = none."""

    draft_vocab: int | None = Field(default=16384, ge=1)
    """Draft only this many tokens, the most frequent of the data. The vocabulary projection is
    most of the cost of training and of drafting."""

    causal: bool = False
    """Let a slot see the slots before it only, instead of its whole block."""

    # How blocks are shown
    glancing: float = Field(default=0.25, ge=0.0, le=1.0)
    """Part of the blocks that glance: the drafter guesses the block, then right tokens are put in
    random slots, the more the more guesses are wrong, and the others are learned."""

    glancing_start: float = Field(default=0.5, ge=0.0, le=1.0)
    """Tokens that are put in for each wrong guess, at the first step."""

    glancing_end: float = Field(default=0.3, ge=0.0, le=1.0)
    """The same at the last step."""

    visible_prefix: float = Field(default=0.25, ge=0.0, le=1.0)
    """Part of the blocks whose first slots hold the right tokens, a random number of them."""

    # Optimisation
    sequences_per_pass: int = Field(default=4, ge=1)
    """Sequences of a batch that pass through the drafter together; bounds memory."""

    dropout: float = Field(default=0.1, ge=0.0, lt=1.0, allow_inf_nan=False)
    """Of what attention and feed-forward networks add, against learning a small data set by
    heart."""

    weight_decay: float = Field(default=0.05, ge=0.0, allow_inf_nan=False)
    """AdamW weight decay of the trained matrices."""

    learning_rate: float = Field(default=1e-3, gt=0.0, allow_inf_nan=False)
    """Peak learning rate."""

    positions_per_sequence: int = Field(default=125, ge=0)
    """Random blocks of each sequence of a batch; 0 = one at every position."""

    batch_size: int = Field(default=16, ge=1)
    """Sequences per batch."""

    cache_dtype: Literal["auto", "bf16", "fp32"] = "bf16"
    """Number format of hidden states kept on disk; ``auto`` is the target's own."""

    # Evaluation
    tree_nodes: list[int] = Field(default_factory=lambda: [12, 32])
    """Node budgets of the draft trees measured at the end."""

    @field_validator("heads", "start_from")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        return None if path is None else Path(os.path.expanduser(path))

    @property
    def kept_folders(self) -> list[tuple[str, Path]]:
        """What training starts from, too: a run that is resumed begins with it."""
        given = [("--start-from", self.start_from), ("--heads", self.heads)]
        start = [(option, folder) for option, folder in given if folder is not None]
        return [*super().kept_folders, *start]

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        kept = sorted(SHAPE & self.model_fields_set)
        if self.start_from is not None and kept:
            raise ValueError(
                f"{', '.join(kept)}: a drafter that is trained further keeps its own; leave that "
                "out, or leave out start_from"
            )
        if self.glancing + self.visible_prefix > 1.0:
            raise ValueError(
                f"glancing={self.glancing:g} and visible_prefix={self.visible_prefix:g} are parts "
                "of the same blocks; together at most 1"
            )
        if self.max_length < self.slots + 3:
            raise ValueError(
                f"max_length={self.max_length} has no room for {self.slots} slots; raise it"
            )
        if any(not 1 <= nodes <= 256 for nodes in self.tree_nodes):
            raise ValueError(f"tree_nodes={self.tree_nodes}: each 1 to 256")
        layers = self.read_layers
        if layers is not None and (not layers or layers != sorted(set(layers)) or layers[0] < 0):
            raise ValueError(f"read_layers={layers}: expected different layers from 0, ascending")
        return self

    @property
    def whole_texts(self) -> bool:
        """The drafter reads the prompt's states, too."""
        return True

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """Layers of a target of so many whose outputs are read, counted from 0."""
        if self.read_layers is not None:
            return tuple(self.read_layers)
        thirds = (num_layers // 3 - 1, 2 * num_layers // 3 - 1, num_layers - 1)
        return tuple(sorted({max(0, layer) for layer in thirds}))

    def state_layers(self, num_layers: int) -> tuple[int, ...]:
        """The same as :meth:`~..target.Target.hidden` counts them."""
        return tuple(layer + 1 for layer in self.layer_ids(num_layers))


FREE_TO_CHANGE = ALWAYS_FREE | {"tree_nodes", "sequences_per_pass"}
