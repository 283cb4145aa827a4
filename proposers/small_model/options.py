# SPDX-License-Identifier: Apache-2.0
"""Options of ``small_model``."""

from typing import Annotated

from pydantic import Field, StringConstraints

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.view_options import StreamOptions


class SmallModelOptions(StreamOptions, MethodOptions):
    """Options of ``small_model`` (speculative decoding with a draft model)."""

    model: Annotated[str, StringConstraints(min_length=1)]
    """Folder (or Hugging Face Hub name) of the draft model; its token ids must be the target's. An
    EAGLE-3 checkpoint of the target will do, too."""

    quantization: Annotated[str, StringConstraints(min_length=1)] | None = None
    """How the draft model's weights are quantized, as vLLM's option; ``null`` as its files say."""

    tree: bool = False
    """Draft a tree of likely continuations; ``num_speculative_tokens`` is then the number of nodes.
    ``false`` drafts a chain."""

    candidates: int = Field(default=4, ge=1, le=32)
    """Children that a node of the tree may have; unused for chains."""

    max_depth: int = Field(default=8, ge=1)
    """Most levels of the tree, each a forward pass of the draft model; unused for chains."""

    draw: bool = True
    """Draw the draft of a request with a temperature from the draft model's probabilities at the
    request's temperature, top-k and top-p, and verify it by speculative sampling; ``false`` drafts
    the likeliest tokens, as always for a request with a seed."""
