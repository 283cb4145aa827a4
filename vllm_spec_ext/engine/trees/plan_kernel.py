# SPDX-License-Identifier: Apache-2.0
"""The compiled loop of :mod:`.plan`: over all nodes of a step, one after the other."""

import numpy as np

from vllm_spec_ext.compiled import kernel


@kernel
def node_depths(parents, starts, depths):  # type: ignore[no-untyped-def]
    """Fill in the depth of each node; returns the number of segments and of their ancestors."""
    num_segments = num_ancestors = 0
    for r in range(starts.shape[0] - 1):
        first = starts[r]
        for i in range(first, starts[r + 1]):
            parent = parents[i]
            depths[i] = 0 if parent < 0 else depths[first + parent] + 1
            if i == first or parent != i - first - 1:
                num_segments += 1
                num_ancestors += depths[i] + 1  # the root is one
    return num_segments, num_ancestors


@kernel
def lay_out(  # type: ignore[no-untyped-def]
    first_rows, num_tokens, num_computed, starts, parents, tails, scratch, block_size
):
    """The arrays of a :class:`.plan.TreePlan`, in the order of its fields.

    Args:
        first_rows: [num_requests] int64, as all of these.
        num_tokens: [num_requests].
        num_computed: [num_requests].
        starts: [num_requests + 1] first node of each request; requests without branches have none.
        parents: [num_nodes] within the request.
        tails: [num_requests] block in which a request's root lies; read where it has nodes.
        scratch: Free blocks.
        block_size: Tokens a block.
    """
    num_requests, num_nodes = first_rows.shape[0], parents.shape[0]
    depths = np.empty(num_nodes, np.int64)
    num_segments, num_ancestors = node_depths(parents, starts, depths)
    rows, positions = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64)
    slots = np.empty(num_nodes, np.int64)
    shared_rows = np.empty(num_ancestors, np.int64)
    shared_slots = np.empty(num_ancestors, np.int64)
    tail_copies = np.empty((num_segments, 2), np.int64)
    most = num_segments + 2 * num_requests
    request_of, seq_lens = np.empty(most, np.int64), np.empty(most, np.int32)
    query_starts, scratch_starts = np.empty(most + 1, np.int32), np.empty(most + 1, np.int64)
    table_rows, table_columns = np.empty_like(scratch), np.empty_like(scratch)
    kept = np.full(num_requests, -1, np.int64)
    num_rows = num_shared = num_tails = num_virtual = num_taken = num_dropped = end_row = 0
    for r in range(num_requests):
        row, root = first_rows[r], num_computed[r]
        first, size = starts[r], starts[r + 1] - starts[r]
        end_row = row + num_tokens[r]
        column, offset = root // block_size, root % block_size
        begin = node = 0
        while begin < size:
            node = begin + 1
            while node < size and parents[first + node] == node - 1:
                node += 1
            last = root + 1 + depths[first + node - 1]
            need = 0 if begin == 0 else last // block_size - column + 1
            if num_taken + need > scratch.shape[0]:
                num_dropped += size - begin
                break
            request_of[num_virtual], seq_lens[num_virtual] = r, last + 1
            # The root belongs to the first segment; both keep the request's own slots.
            query_starts[num_virtual] = row if begin == 0 else row + 1 + begin
            scratch_starts[num_virtual] = num_taken
            if begin > 0:
                taken = scratch[num_taken : num_taken + need]
                if offset:
                    tail_copies[num_tails, 0], tail_copies[num_tails, 1] = tails[r], taken[0]
                    num_tails += 1
                # What lies `place` behind the beginning of the tail block has this slot.
                for i in range(begin, node):
                    place = offset + 1 + depths[first + i]
                    rows[num_rows] = row + 1 + i
                    positions[num_rows] = root + 1 + depths[first + i]
                    slots[num_rows] = taken[place // block_size] * block_size + place % block_size
                    num_rows += 1
                ancestor = parents[first + begin]
                while True:
                    place = offset if ancestor < 0 else offset + 1 + depths[first + ancestor]
                    slot = taken[place // block_size] * block_size + place % block_size
                    shared_rows[num_shared], shared_slots[num_shared] = row + 1 + ancestor, slot
                    num_shared += 1
                    if ancestor < 0:
                        break
                    ancestor = parents[first + ancestor]
                for i in range(need):
                    table_rows[num_taken + i] = num_virtual
                    table_columns[num_taken + i] = column + i
                num_taken += need
            num_virtual += 1
            begin = node
        if size > 0:
            kept[r] = begin
        # What is left is computed where vLLM put it, and ignored: its slots lie behind every slot
        # of the first segment, so it harms nothing. All of a request without branches is left.
        left = row if size == 0 else row + 1 + begin
        if left < end_row:
            request_of[num_virtual], seq_lens[num_virtual] = r, root + num_tokens[r]
            query_starts[num_virtual], scratch_starts[num_virtual] = left, num_taken
            num_virtual += 1
    query_starts[num_virtual], scratch_starts[num_virtual] = end_row, num_taken
    return (
        rows[:num_rows],
        positions[:num_rows],
        slots[:num_rows],
        shared_rows[:num_shared],
        shared_slots[:num_shared],
        tail_copies[:num_tails],
        request_of[:num_virtual],
        query_starts[: num_virtual + 1],
        seq_lens[:num_virtual],
        scratch_starts[: num_virtual + 1],
        table_rows[:num_taken],
        table_columns[:num_taken],
        scratch[:num_taken],
        kept,
        num_dropped,
    )
