# SPDX-License-Identifier: Apache-2.0
"""How one step verifies draft trees with plain causal attention; numpy and a compiled loop.

A tree is cut into *segments*: runs of nodes whose parent is the node right before. To attention,
each segment is a request of its own (a *virtual request*): its block table is the request's blocks
up to the partial tail block, followed by scratch blocks that hold a copy of the tail, the segment's
ancestors and the segment itself. The first segment keeps the request's own blocks, so a tree that
behaves like a chain costs like one. All rows stay where vLLM put them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.engine.trees.plan_kernel import committed, cut, place
from vllm_spec_ext.proposers.draft_tree import node_depths
from vllm_spec_ext.scorers.walk.tree import node_depths as depths_of_batch

if TYPE_CHECKING:
    from vllm_spec_ext.engine.trees.plan_tensors import PlanTensors

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class RequestRows:
    """One request's part of a step."""

    first_row: int  # its first token in the flattened batch
    num_tokens: int  # its tokens in this step; those behind its nodes only fill the step up
    num_computed: int  # position of its first token
    parents: Sequence[int] | None = None  # of its draft nodes if they branch, else None


@dataclass
class TreePlan:
    """What to change before the forward pass of a step, and what to copy after it.

    Arrays are int64, but for those that attention reads, which are int32.
    """

    rows: IntArray  # [n] rows of nodes in scratch blocks ...
    positions: IntArray  # ... their positions ...
    slots: IntArray  # ... and slots
    shared_rows: IntArray  # [n] ancestors that are written once more ...
    shared_slots: IntArray  # ... and where
    tail_copies: IntArray  # [n, 2] (from block, to block)
    request_of: IntArray  # [num_virtual] request of each virtual request
    query_starts: IntArray  # [num_virtual + 1] int32 first row of each; ascending, without a gap
    seq_lens: IntArray  # [num_virtual] int32
    scratch_starts: IntArray  # [num_virtual + 1] first of the block-table entries of each ...
    table_rows: IntArray  # [n] ... that change: virtual request ...
    table_columns: IntArray  # ... column ...
    table_blocks: IntArray  # ... and scratch block
    kept: IntArray  # [num_requests] nodes that are really verified; -1 = no branches
    num_dropped: int  # nodes for which no scratch block was left
    longest_query: int  # rows of the longest virtual request
    longest_seq: int  # tokens that the longest one attends to
    first_rows: IntArray  # [num_requests] of each request
    num_computed: IntArray  # [num_requests]
    block_size: int
    tensors: "PlanTensors | None" = None  # the same on the device, once it was asked for

    def commits(
        self, accepted: IntArray, num_accepted: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Where the accepted tokens' KV lies if it is not in the requests' own blocks.

        Args:
            accepted: [num_requests, n] int64 nodes of the accepted paths, root's child first.
            num_accepted: [num_requests] int64 how many of them count.

        Returns:
            Requests, scratch blocks, and columns of the requests' block tables.
        """
        virtual = (self.query_starts, self.scratch_starts, self.table_blocks, self.table_columns)
        requests = (self.first_rows, self.num_computed)
        found: tuple[IntArray, IntArray, IntArray] = committed(
            *virtual, *requests, accepted, num_accepted, self.block_size
        )
        return found


def segment_bounds(parents: Sequence[int]) -> list[tuple[int, int]]:
    """Bounds ``[first, end)`` of the runs in which each node follows its parent."""
    starts = [i for i, parent in enumerate(parents) if i == 0 or parent != i - 1]
    return list(zip(starts, [*starts[1:], len(parents)], strict=True))


def num_scratch_blocks(depth: int, num_computed: int, block_size: int) -> int:
    """Blocks that a segment needs whose last node lies `depth` (from 0) below the root."""
    return (num_computed + 1 + depth) // block_size - num_computed // block_size + 1


def fitting_prefix(
    parents: Sequence[int], num_computed: int, block_size: int, num_free: int
) -> tuple[int, int]:
    """The longest prefix of a tree whose segments fit into the free scratch blocks.

    Returns:
        Its number of nodes, and the scratch blocks it needs.
    """
    used = 0
    for first, depth in _scratch_segments(tuple(parents)):
        need = num_scratch_blocks(depth, num_computed, block_size)
        if used + need > num_free:
            return first, used
        used += need
    return len(parents), used


@lru_cache(maxsize=4096)
def _scratch_segments(parents: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """First node and depth of the last one, of all segments but the first.

    Many proposers draft few forms of trees, step after step.
    """
    depths = node_depths(parents)
    return tuple((first, depths[end - 1]) for first, end in segment_bounds(parents)[1:])


def build_plan(
    requests: Sequence[RequestRows],
    block_table: Sequence[Sequence[int]] | Sequence[IntArray] | NDArray[np.int32],  # block ids
    block_size: int,
    scratch: Sequence[int] | IntArray,  # free scratch block ids
) -> TreePlan:
    """Plan a step in which at least one request drafts branches."""
    nodes = [request.parents or () for request in requests]
    tails = [
        int(blocks[request.num_computed // block_size]) if request.parents else -1
        for request, blocks in zip(requests, block_table, strict=False)
    ]
    first_rows = np.array([request.first_row for request in requests], np.int64)
    num_tokens = np.array([request.num_tokens for request in requests], np.int64)
    computed = np.array([request.num_computed for request in requests], np.int64)
    starts = np.array([0, *accumulate(map(len, nodes))], np.int64)
    parents = np.fromiter(chain.from_iterable(nodes), np.int64)
    trees = (starts, parents, depths_of_batch(parents, starts))
    free = np.asarray(scratch, np.int64)
    cuts = cut(first_rows, num_tokens, computed, *trees, len(free), block_size)
    request_of, query_starts, seq_lens, scratch_starts, kept, num_dropped, *longest = cuts
    virtual = (request_of, query_starts, scratch_starts)
    where = place(
        *virtual, first_rows, computed, *trees, np.array(tails, np.int64), free, block_size
    )
    rows, positions, slots, shared_rows, shared_slots, tail_copies, columns_of, columns = where
    return TreePlan(
        rows=rows,
        positions=positions,
        slots=slots,
        shared_rows=shared_rows,
        shared_slots=shared_slots,
        tail_copies=tail_copies,
        request_of=request_of,
        query_starts=query_starts,
        seq_lens=seq_lens,
        scratch_starts=scratch_starts,
        table_rows=columns_of,
        table_columns=columns,
        table_blocks=free[: len(columns)],
        kept=kept,
        num_dropped=num_dropped,
        longest_query=int(longest[0]),
        longest_seq=int(longest[1]),
        first_rows=first_rows,
        num_computed=computed,
        block_size=block_size,
    )


def warm_up() -> None:
    """Compile the layout (seconds on a cold cache) before the first request."""
    plan = build_plan([RequestRows(0, 3, 1, [-1, -1])], [[0]], 2, [1, 2])
    plan.commits(np.array([[1]], np.int64), np.array([1], np.int64))
