# SPDX-License-Identifier: Apache-2.0
"""How many KV blocks are set aside for branches, and for drafts that leave a request's blocks."""

MAX_TREES = 16  # requests that may draft branches in the same step before trees get smaller


def num_scratch_blocks(
    tree: bool, num_draft_tokens: int, max_num_seqs: int, block_size: int | None = None
) -> int:
    """KV blocks for the branches of draft trees, and for what draft models and views read ahead.

    A segment of a tree needs one block, two if it crosses a block border, and a tree rarely has
    more than half as many segments as nodes; with blocks of 128 tokens, as on CPUs, a block for
    each node would be most of the memory. A chain of a draft model leaves the blocks of its
    request by at most its length; one request in (block size / length) does so in a step. Where
    the blocks do not suffice, drafts get smaller.

    Args:
        tree: Drafts may have branches.
        num_draft_tokens: Most draft tokens of a request.
        max_num_seqs: Most requests in a step.
        block_size: Tokens a block, if there are draft models or views.
    """
    few = min(max_num_seqs, MAX_TREES)
    number = few * -(-num_draft_tokens // 2) if tree else 0
    if block_size is not None:
        number += few * -(-num_draft_tokens // block_size)
        number += -(-(max_num_seqs - few) * num_draft_tokens // block_size)
    return number
