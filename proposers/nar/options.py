# SPDX-License-Identifier: Apache-2.0
"""Options of ``nar``."""

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from vllm_spec_ext.options import MethodOptions


class NarOptions(MethodOptions):
    """Options of ``nar`` (non-autoregressive block drafting)."""

    model: Annotated[str, StringConstraints(min_length=1)]
    """Folder (or Hugging Face Hub name) of the drafter: a DFlash checkpoint of the target, or one
    with the extras of ``nar``."""

    tree: bool = False
    """Draft a tree of the slots' candidates; ``num_speculative_tokens`` is then the number of
    nodes. ``false`` drafts the chain of likeliest tokens."""

    slots: int | None = Field(default=None, ge=1)
    """Masks of a block, so the longest path of a draft but for ``copies`` behind it; ``null`` takes
    as many as the checkpoint was trained with, at most ``num_speculative_tokens``."""

    candidates: int = Field(default=16, ge=1, le=64)
    """Tokens of each slot that a tree, a draw or a pairwise selector chooses from."""

    copies: bool = True
    """Show slots the tokens that followed the latest place where the end of the text occurred
    before, if the checkpoint was trained for it, and go on with them behind a block that holds
    them; ``false`` leaves masks there."""

    min_confidence: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Leave out draft tokens whose path is, to the drafter, less likely than this; 0 keeps all."""

    draw: bool = False
    """Draw the draft of a request with a temperature from the candidates' probabilities at the
    request's temperature, top-k and top-p, and verify it by speculative sampling; ``false`` drafts
    the likeliest tokens. For chains."""

    @model_validator(mode="after")
    def _draws_are_chains(self) -> "NarOptions":
        if self.draw and self.tree:
            raise ValueError("draw=true drafts chains; leave tree out, or draw")
        return self
