# SPDX-License-Identifier: Apache-2.0
"""How one step verifies draft trees with plain causal attention; numpy only.

A tree is cut into *segments*: runs of nodes whose parent is the node right before. To attention,
each segment is a request of its own (a *virtual request*): its block table is the request's blocks
up to the partial tail block, followed by scratch blocks that hold a copy of the tail, the segment's
ancestors and the segment itself. The first segment keeps the request's own blocks, so a tree that
behaves like a chain costs like one. All rows stay where vLLM put them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.draft_tree import node_depths

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class RequestRows:
    """One request's part of a step."""

    first_row: int  # its first token in the flattened batch
    num_tokens: int  # its tokens in this step; those behind its nodes only fill the step up
    num_computed: int  # position of its first token
    parents: Sequence[int] | None = None  # of its draft nodes if they branch, else None


@dataclass(frozen=True)
class Segment:
    """A run of nodes; all but a request's first one live in scratch blocks."""

    first: int  # node index
    end: int  # one behind its last node
    scratch: tuple[int, ...]  # block ids that stand for columns from `column` on; () = own blocks
    column: int  # first column of the block table that `scratch` replaces


@dataclass
class TreePlan:
    """What to change before the forward pass of a step, and what to copy after it."""

    rows: list[int] = field(default_factory=list)  # rows whose position changes ...
    positions: list[int] = field(default_factory=list)  # ... and to what
    scratch_rows: list[int] = field(default_factory=list)  # rows written to scratch instead ...
    scratch_slots: list[int] = field(default_factory=list)  # ... and where
    shared_rows: list[int] = field(default_factory=list)  # ancestors that are written once more ...
    shared_slots: list[int] = field(default_factory=list)  # ... and where
    tail_copies: list[tuple[int, int]] = field(default_factory=list)  # (from block, to block)
    request_of: list[int] = field(default_factory=list)  # request of each virtual request
    query_starts: list[int] = field(default_factory=list)  # first row of each virtual request
    query_lens: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    table_rows: list[int] = field(default_factory=list)  # block-table entries that change:
    table_columns: list[int] = field(default_factory=list)
    table_blocks: list[int] = field(default_factory=list)
    segments: dict[int, list[Segment]] = field(default_factory=dict)  # by request
    num_dropped: int = 0  # nodes for which no scratch block was left

    def add_virtual(self, request: int, start: int, length: int, seq_len: int) -> int:
        """Append a virtual request and return its index."""
        self.request_of.append(request)
        self.query_starts.append(start)
        self.query_lens.append(length)
        self.seq_lens.append(seq_len)
        return len(self.request_of) - 1

    def kept(self, request: int, num_nodes: int) -> int:
        """How many of a request's nodes, from the first, were really verified."""
        segments = self.segments.get(request)
        return num_nodes if segments is None else segments[-1].end

    def commits(
        self, request: int, last_node: int, last_position: int, block_size: int
    ) -> list[tuple[int, int]]:
        """Where the accepted tokens' KV lies if it is not in the request's own blocks.

        Args:
            request: Index in the batch.
            last_node: Last accepted node, -1 for none.
            last_position: Its position.
            block_size: Tokens a block.

        Returns:
            Pairs (scratch block, column of the request's block table).
        """
        for segment in self.segments.get(request, ()):
            if segment.first <= last_node < segment.end and segment.scratch:
                num_blocks = last_position // block_size - segment.column + 1
                return [(b, segment.column + i) for i, b in enumerate(segment.scratch[:num_blocks])]
        return []


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
    depths = node_depths(parents)
    used = 0
    for first, end in segment_bounds(parents)[1:]:
        need = num_scratch_blocks(depths[end - 1], num_computed, block_size)
        if used + need > num_free:
            return first, used
        used += need
    return len(parents), used


@dataclass(frozen=True)
class _Run:
    """A segment of a tree of some form, wherever the tree stands."""

    first: int
    end: int
    depths: tuple[int, ...]  # of its nodes, 0 for children of the root
    ancestors: tuple[tuple[int, int], ...]  # (node, depth) from its parent up, without the root


@lru_cache(maxsize=4096)
def _runs_of(parents: tuple[int, ...]) -> tuple[_Run, ...]:
    """Segments of a tree of this form; many proposers draft few forms, step after step."""
    depths = node_depths(parents)
    runs = []
    for first, end in segment_bounds(parents):
        ancestors, node = [], parents[first]
        while node >= 0:
            ancestors.append((node, depths[node]))
            node = parents[node]
        runs.append(_Run(first, end, tuple(depths[first:end]), tuple(ancestors)))
    return tuple(runs)


def build_plan(
    requests: Sequence[RequestRows],
    block_table: Sequence[Sequence[int]] | NDArray[np.int32],  # block ids of each request
    block_size: int,
    scratch: Sequence[int],  # free scratch block ids
) -> TreePlan:
    """Plan a step in which at least one request drafts branches."""
    plan = TreePlan()
    num_taken = 0
    for index, request in enumerate(requests):
        if request.parents is None:
            end = request.num_computed + request.num_tokens
            plan.add_virtual(index, request.first_row, request.num_tokens, end)
        else:
            blocks = block_table[index]
            num_taken = _plan_tree(plan, index, request, blocks, block_size, scratch, num_taken)
    return plan


def _plan_tree(
    plan: TreePlan,
    index: int,
    request: RequestRows,
    blocks: Sequence[int] | NDArray[np.int32],
    block_size: int,
    scratch: Sequence[int],
    num_taken: int,  # of the scratch blocks
) -> int:
    """Add one tree to a plan; returns how many scratch blocks are taken then."""
    assert request.parents is not None
    parents, root = request.parents, request.num_computed
    column, offset = divmod(root, block_size)
    segments = plan.segments.setdefault(index, [])
    for run in _runs_of(tuple(parents)):
        row = request.first_row + 1 + run.first
        last = root + 1 + run.depths[-1]
        if run.first == 0:
            # The root belongs to the first segment; both keep the request's own slots.
            plan.add_virtual(index, request.first_row, run.end + 1, last + 1)
            segments.append(Segment(0, run.end, (), column))
            continue
        need = last // block_size - column + 1
        if num_taken + need > len(scratch):
            plan.num_dropped += len(parents) - run.first
            _ignore(plan, index, request, run.first)
            return num_taken
        taken = tuple(scratch[num_taken : num_taken + need])
        num_taken += need
        segments.append(Segment(run.first, run.end, taken, column))
        if offset:
            plan.tail_copies.append((int(blocks[column]), taken[0]))
        # What lies `place` behind the beginning of the tail block has this slot.
        starts = [block * block_size for block in taken]
        places = [offset + 1 + depth for depth in run.depths]
        rows = range(row, row + len(places))
        plan.rows += rows
        plan.positions += [root + 1 + depth for depth in run.depths]
        plan.scratch_rows += rows
        plan.scratch_slots += [starts[p // block_size] + p % block_size for p in places]
        for node, depth in run.ancestors:
            place = offset + 1 + depth
            plan.shared_rows.append(request.first_row + 1 + node)
            plan.shared_slots.append(starts[place // block_size] + place % block_size)
        plan.shared_rows.append(request.first_row)
        plan.shared_slots.append(starts[0] + offset)
        virtual = plan.add_virtual(index, row, len(places), last + 1)
        plan.table_rows += [virtual] * need
        plan.table_columns += range(column, column + need)
        plan.table_blocks += taken
    _ignore(plan, index, request, len(parents))
    return num_taken


def _ignore(plan: TreePlan, index: int, request: RequestRows, first: int) -> None:
    """Leave nodes from `first` on to themselves: computed where vLLM put them, and ignored.

    Their slots lie behind every slot of the first segment, so they harm nothing.
    """
    num_nodes = request.num_tokens - 1 - first
    if num_nodes:
        end = request.num_computed + request.num_tokens
        plan.add_virtual(index, request.first_row + 1 + first, num_nodes, end)
