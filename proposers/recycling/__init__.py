# SPDX-License-Identifier: Apache-2.0
"""Token recycling: the target's likeliest next tokens at rows that it verified anyway.

Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with
Token Recycling"; what differs is said in ``candidates/recycled_rows.py``. Lossless; no training and
no model.
"""

from typing import cast

from vllm_spec_ext.proposers.base import EngineHandle, Needs, proposer
from vllm_spec_ext.proposers.candidates.lookup import Lookup
from vllm_spec_ext.proposers.candidates.lookup_method import LookupMethod
from vllm_spec_ext.proposers.candidates.recycled_rows import NUM_KEPT
from vllm_spec_ext.proposers.recycling.options import RecyclingOptions


@proposer(
    "recycling",
    summary="What the target foresaw when it verified other drafts, rejected ones included.",
    options=RecyclingOptions,
    num_speculative_tokens=32,
    tree=True,
    best_for="wide trees, where verifying costs little; beside other sources in `auto`",
    cost="the likeliest tokens of each verified row; 5 MB in all",
)
class Recycling(LookupMethod):
    """See the module docstring."""

    needs = Needs(next_tokens=NUM_KEPT, shares_nodes=True)

    def lookup(self, engine: EngineHandle) -> Lookup:
        """The recycled rows alone."""
        options = cast(RecyclingOptions, self.options)
        return Lookup(
            engine.vocab_size,
            own_text=False,
            earlier_answers=0,
            recycled_contexts=options.contexts,
            max_cache_salts=options.max_cache_salts,
            max_ngram=2,
        )
