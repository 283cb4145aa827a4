# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with a small draft model (Leviathan et al. 2023; Chen et al. 2023).

vLLM has a method of that kind, ``draft_model``. This one runs the model in the target's own KV
blocks, reads only what is new in the first pass of a step, draws with real probabilities, drafts
trees if asked to, and runs no pass that costs more than it saves.
"""

from collections.abc import Sequence
from typing import cast

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import ModelSpec, proposer
from vllm_spec_ext.proposers.growth.learning_model import OneModelLearns
from vllm_spec_ext.proposers.growth.model_names import named
from vllm_spec_ext.proposers.growth.tree_drafting import Extent
from vllm_spec_ext.proposers.small_model.options import SmallModelOptions


@proposer(
    "small_model",
    summary="A small model of the target's vocabulary drafts a chain, or a tree.",
    options=SmallModelOptions,
    num_speculative_tokens=4,
    needs_checkpoint=True,
    tree=True,
    best_for="any text, where a model at least ten times faster than the target exists",
    cost="a forward pass of the draft model for each level of the draft",
)
class SmallModel(OneModelLearns):
    """A chain or a tree of one draft model."""

    @classmethod
    def models(cls, options: MethodOptions) -> Sequence[ModelSpec]:
        """The draft model."""
        asked = cast(SmallModelOptions, options)
        return named([ModelSpec("", asked.model, None, asked.quantization, asked.stream())])

    def extent(self) -> Extent:
        """A chain is a tree of one candidate a level."""
        asked = cast(SmallModelOptions, self.options)
        if not asked.tree:
            return Extent(None, 1, 2**31, 1, asked.draw)
        return Extent(None, asked.candidates, asked.max_depth, 8, asked.draw)
