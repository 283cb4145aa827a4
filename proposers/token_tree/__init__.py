# SPDX-License-Identifier: Apache-2.0
"""Token trees of one or several draft models (SpecInfer, Miao et al. 2024).

Expansion trees (sec. 3.1), merged trees of several models (sec. 3.2) and multi-step speculative
sampling (sec. 4.3); beyond the paper, trees that grow towards the likeliest paths, and levels that
are drafted only if they save time. The paper's top-k children with the model's own probabilities
are biased: here children are chosen and verified as such, or drawn.
"""

from collections.abc import Sequence
from typing import cast

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import ModelSpec, TargetFacts, proposer
from vllm_spec_ext.proposers.growth.learning_model import OneModelLearns
from vllm_spec_ext.proposers.growth.model_names import named
from vllm_spec_ext.proposers.growth.shapes import expansion_size
from vllm_spec_ext.proposers.growth.tree_drafting import Extent
from vllm_spec_ext.proposers.token_tree.options import TokenTreeOptions


@proposer(
    "token_tree",
    summary="One or several small models draft a tree of likely continuations.",
    options=TokenTreeOptions,
    num_speculative_tokens=16,
    needs_checkpoint=True,
    tree=True,
    best_for="any text, where a much faster model exists and verification is nearly free",
    cost="a forward pass of each draft model for each level of the tree",
)
class TokenTree(OneModelLearns):
    """Expansion trees, dynamic trees, merged trees."""

    @classmethod
    def check(cls, options: MethodOptions, target: TargetFacts) -> None:
        """An expansion that does not fit into the node budget; raises SpecExtError."""
        asked = cast(TokenTreeOptions, options)
        if asked.expansion is None:
            return
        size, num_models = expansion_size(asked.expansion), len(asked.models)
        if size * num_models > target.num_speculative_tokens:
            raise SpecExtError(
                f"expansion: found {asked.expansion}, a tree of {size} nodes for each of "
                f"{num_models} model{'s' if num_models > 1 else ''}; expected at most "
                f"num_speculative_tokens={target.num_speculative_tokens} nodes in all. Set "
                f'"num_speculative_tokens": {size * num_models}, or shorten the expansion'
            )

    @classmethod
    def models(cls, options: MethodOptions) -> Sequence[ModelSpec]:
        """The draft models, in the order in which they are named."""
        asked = cast(TokenTreeOptions, options)
        return named(
            [
                ModelSpec("", given)
                if isinstance(given, str)
                else ModelSpec("", given.model, quantization=given.quantization)
                for given in asked.models
            ]
        )

    def extent(self) -> Extent:
        """The expansion as given, or what bounds a dynamic tree."""
        asked = cast(TokenTreeOptions, self.options)
        if asked.expansion is None:
            return Extent(None, asked.candidates, asked.max_depth, asked.max_branches, asked.draw)
        widest = expansion_size(asked.expansion)
        return Extent(tuple(asked.expansion), 1, len(asked.expansion), widest, asked.draw)
