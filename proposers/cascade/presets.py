# SPDX-License-Identifier: Apache-2.0
"""Presets: the numbers of published cascades."""

from vllm_spec_ext.errors import SpecExtError

# TriForce (Sun et al. 2024), the best values of its ablations with Llama2-7B-128K at 122,000 tokens
# of context. Its draft model streams over 256 tokens with a sink of 16, as is the default of
# `StreamOptions`. Not taken: positions that are counted within the stream (keys carry their true
# ones here, so the draft model must know contexts of that length); pages of 8 tokens, chosen for
# each head (here whole KV blocks, for each layer); and the draw from the whole of the reviewer's
# distribution after a rejection, which its code does and which is not lossless.
TRIFORCE_TOKENS = [6]
"""What the view writes for the target (gamma 2 there)."""
TRIFORCE_REVIEWS = 2
"""What the draft model writes for one review of the view (gamma 1)."""
TRIFORCE_BUDGET = 4096
"""Tokens in sight of the view."""


def cs_drafting(
    num_methods: int, num_models: int, num_views: int
) -> tuple[list[int], list[list[int]], float]:
    """Cascade Speculative Drafting (Chen et al. 2023), as its code configures it.

    The matrix K of the paper has a row for each reviewer, the target first: how many tokens each of
    its drafters writes. Taken from it: the rows, as ``tokens`` and ``reviews``; that a neural
    drafter reviews the next smaller one and never drafts alone where that has something (vertical
    cascade); that the end of a draft comes from smaller drafters without a review (horizontal
    cascade); lenience between levels; and that all drafts are chains. Not taken: the bigram table;
    and lenience is measured against the reviewer's own likeliest token, not against a draft
    probability, which a suffix look-up does not have: 1/3 and 1/2 for the code's 3 and 2.

    Args:
        num_methods: Levels that are methods; 0 = ``ngram`` is to be added.
        num_models: Levels that are models.
        num_views: Levels that are views of the target.

    Returns:
        ``tokens``; ``reviews`` of each model, the lowest first; and the lenience.

    Raises:
        SpecExtError: It has no numbers for so many levels.
    """
    if num_methods > 1 or num_models not in (1, 2) or num_views:
        view = " and a view" if num_views else ""
        raise SpecExtError(
            f'preset "cs_drafting": found {num_methods} methods and {num_models} models{view}, '
            "expected one method at most, and one or two models; leave the preset out and give "
            "tokens and reviews"
        )
    if num_models == 1:  # LLaMA-160M and the look-up: K = [[13, 10], [0, 10]], lenience 3
        return [13, 10], [[10]], 1 / 3
    # FLAN-T5 base, small and the look-up: K = [[5, 14, 10], [0, 1, 10], [0, 0, 10]], lenience 2
    return [5, 14, 10], [[10], [1, 10]], 1 / 2
