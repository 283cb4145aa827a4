# SPDX-License-Identifier: Apache-2.0
"""Options of ``token_tree``."""

from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from vllm_spec_ext.options import MethodOptions, Options

Name = Annotated[str, StringConstraints(min_length=1)]


class TreeModel(Options):
    """A draft model that needs more than its name."""

    model: Name
    """Folder (or Hugging Face Hub name)."""

    quantization: Name | None = None
    """How its weights are quantized, as vLLM's option; ``null`` as its files say."""


class TokenTreeOptions(MethodOptions):
    """Options of ``token_tree`` (SpecInfer)."""

    models: Annotated[list[Name | TreeModel], Field(min_length=1, max_length=8)]
    """Draft models: folders (or Hugging Face Hub names), or objects
    ``{"model": ..., "quantization": ...}``. Their token ids must be the target's. EAGLE-3
    checkpoints of the target will do, too. Name the best one first: each is credited with what
    those before it do not give."""

    expansion: list[Annotated[int, Field(ge=1, le=8)]] | None = None
    """Grow the same tree in every step: step i adds so many children to each node of the step
    before, e.g. ``[1, 1, 3, 1, 1]`` for 1 + 1 + 3 + 3 + 3 nodes of each model. ``null`` grows
    towards the likeliest paths, with ``num_speculative_tokens`` nodes in all."""

    candidates: int = Field(default=4, ge=1, le=8)
    """Children that a node may have; unused with ``expansion``."""

    max_depth: int = Field(default=8, ge=1)
    """Most levels, each a forward pass of every model; unused with ``expansion``."""

    max_branches: int = Field(default=8, ge=1)
    """Most nodes of a level and request that a model reads on; unused with ``expansion``."""

    draw: bool = True
    """Draw the draft of a request with a temperature from the models' probabilities at the
    request's temperature, top-k and top-p, and verify it by multi-step speculative sampling;
    ``false`` drafts the likeliest tokens, as always for a request with a seed."""

    @field_validator("expansion")
    @classmethod
    def _grows_something(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and not value:
            raise ValueError("an expansion has at least one step; leave it out for dynamic trees")
        return value
