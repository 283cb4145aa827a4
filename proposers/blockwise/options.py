# SPDX-License-Identifier: Apache-2.0
"""Options of ``blockwise``."""

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from vllm_spec_ext.options import MethodOptions


class BlockwiseOptions(MethodOptions):
    """Options of ``blockwise`` (blockwise parallel decoding)."""

    model: Annotated[str, StringConstraints(min_length=1)]
    """Folder (or Hugging Face Hub name) of the heads, made by ``vllm-spec train blockwise``."""

    tree: bool = False
    """Draft a tree of the heads' best candidates; ``num_speculative_tokens`` is then the number
    of nodes. ``false`` drafts the chain of each head's best token."""

    candidates: int = Field(default=4, ge=1, le=32)
    """Tokens of each head that may enter the tree; unused for chains."""

    min_confidence: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Leave out draft tokens whose path is, to the heads, less likely than this; 0 keeps all."""

    draw: bool = False
    """Draw the draft of a request with a temperature from the heads' probabilities at that
    temperature, and verify it by speculative sampling, instead of drafting each head's best token.
    For chains."""

    @model_validator(mode="after")
    def _draws_are_chains(self) -> "BlockwiseOptions":
        if self.draw and self.tree:
            raise ValueError("draw=true drafts chains; leave tree out, or draw")
        return self
