# SPDX-License-Identifier: Apache-2.0
"""How many KV blocks are set aside for branches, and for drafts that leave a request's blocks."""

import logging
from dataclasses import dataclass

from vllm_spec_ext.errors import SpecExtError

logger = logging.getLogger("vllm.spec_ext")

MAX_TREES = 16  # requests that may draft branches in the same step before trees get smaller

_PARTS = 8  # one of so many KV blocks is for drafts, unless one request's need more
_MUCH = 0.25  # of the KV cache: so much less for requests has them wait for each other


@dataclass(frozen=True)
class ScratchNeed:
    """KV blocks that drafts can use; how many they get depends on how many there are.

    Where KV is short, requests that wait for blocks lose more than drafts that get smaller: with
    SmolLM2 and 300 MB, 128 of 225 blocks for the trees of eight requests made ``auto`` slower than
    plain decoding, which it beats by a tenth with 1 GB.
    """

    most: int
    """What a step of all requests can use."""
    least: int
    """What a step of one request can use."""

    @classmethod
    def of_drafts(
        cls, tree: bool, num_draft_tokens: int, max_num_seqs: int, block_size: int | None = None
    ) -> "ScratchNeed":
        """For drafts of this size; see :func:`most_used`, whose arguments these are."""
        most, least = (
            most_used(tree, num_draft_tokens, requests, block_size)
            for requests in (max_num_seqs, 1)
        )
        return cls(most, least)

    def out_of(self, num_blocks: int) -> int:
        """How many of all KV blocks are scratch blocks."""
        return self._bounded(-(-num_blocks // _PARTS))

    def behind(self, num_blocks: int) -> int:
        """How many scratch blocks belong to so many blocks of requests.

        Ranks differ in memory, and vLLM gives all as many blocks as the poorest has: so all come to
        the same number, and none has set fewer aside.
        """
        return self._bounded(num_blocks // (_PARTS - 1))

    def with_requests(self, num_blocks: int) -> int:
        """The fewest KV blocks of which so many are left to requests."""
        return num_blocks + self._bounded(-(-num_blocks // (_PARTS - 1)))

    def _bounded(self, number: int) -> int:
        return min(self.most, max(self.least, number))


NO_SCRATCH = ScratchNeed(0, 0)


def most_used(
    tree: bool, num_draft_tokens: int, max_num_seqs: int, block_size: int | None = None
) -> int:
    """Blocks for the branches of draft trees, and for what draft models and views read ahead.

    A segment of a tree needs one block, two if it crosses a block border. Trees of several requests
    together rarely have more than half as many segments as nodes, and a block for each node would
    be much of a small KV cache; but one request alone can draft such a tree. A chain of a draft
    model leaves the blocks of its request by at most its length; one request in (block size /
    length) does so in a step. Where the blocks do not suffice, drafts get smaller.

    Args:
        tree: Drafts may have branches.
        num_draft_tokens: Most draft tokens of a request.
        max_num_seqs: Most requests in a step.
        block_size: Tokens a block, if there are draft models or views.
    """
    few = min(max_num_seqs, MAX_TREES)
    number = max(few * -(-num_draft_tokens // 2), num_draft_tokens) if tree else 0
    if block_size is not None:
        number += few * -(-num_draft_tokens // block_size)
        number += -(-(max_num_seqs - few) * num_draft_tokens // block_size)
    return number


def check_room(left: int, available: int, needed: int, expected: int, num_blocks: int) -> None:
    """Say so if scratch blocks and page means leave little for requests, or no room for one.

    Where one would not fit without them either, nothing is said: vLLM's own message is right then.

    Args:
        left: Bytes for KV of requests.
        available: Bytes for all KV.
        needed: Bytes that the KV of the longest request takes.
        expected: Bytes for all KV that would leave so many for requests.
        num_blocks: Scratch blocks.

    Raises:
        SpecExtError: With what can be done.
    """
    if available < needed:
        return
    if left < needed:
        raise SpecExtError(
            f"too little KV cache beside what drafts need: found {available} bytes, expected at "
            f"least {expected}: {needed} for one request of max_model_len tokens, "
            f"and {expected - needed} for drafts (now {num_blocks} blocks for branches and for "
            "what is drafted ahead, and means of pages where a view chooses them). Raise "
            "--kv-cache-memory-bytes or --gpu-memory-utilization (on a CPU VLLM_CPU_KVCACHE_SPACE, "
            "in GiB, wins over both where it is set), or lower --max-model-len, "
            "--max-num-seqs or num_speculative_tokens; "
            "a method that drafts chains without a model needs no such blocks"
        )
    if available - left > _MUCH * available:
        logger.warning(
            "vllm-spec-ext: %d of the %d MiB of KV cache are set aside for drafts (%d blocks), so "
            "batches may wait for blocks that plain decoding would have; raise "
            "--kv-cache-memory-bytes or --gpu-memory-utilization, or lower --max-num-seqs or "
            "num_speculative_tokens",
            (available - left) >> 20,
            available >> 20,
            num_blocks,
        )
