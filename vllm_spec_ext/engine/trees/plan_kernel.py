# SPDX-License-Identifier: Apache-2.0
"""The compiled loops of :mod:`.plan`, over all nodes of a step; arrays are int64 on the way in."""

import numpy as np

from vllm_spec_ext.compiled import kernel


@kernel
def cut(  # type: ignore[no-untyped-def]
    first_rows, num_tokens, num_computed, starts, parents, depths, num_scratch, block_size
):
    """Cut the step into virtual requests, and say how many scratch blocks each takes.

    Args:
        first_rows: [num_requests] of each request.
        num_tokens: [num_requests].
        num_computed: [num_requests].
        starts: [num_requests + 1] first node of each request; requests without branches have none.
        parents: [num_nodes] within the request.
        depths: [num_nodes].
        num_scratch: Free blocks.
        block_size: Tokens a block.

    Returns:
        ``request_of``, ``query_starts``, ``seq_lens``, ``scratch_starts``, ``kept``,
        ``num_dropped``, ``longest_query`` and ``longest_seq`` of a :class:`.plan.TreePlan`.
    """
    num_requests = len(first_rows)
    most = len(parents) + num_requests
    request_of, seq_lens = np.empty(most, np.int64), np.empty(most, np.int32)
    query_starts, scratch_starts = np.empty(most + 1, np.int32), np.empty(most + 1, np.int64)
    kept = np.full(num_requests, -1, np.int64)
    v = num_taken = num_dropped = end_row = 0
    for r in range(num_requests):
        row, root = first_rows[r], num_computed[r]
        first, size = starts[r], starts[r + 1] - starts[r]
        end_row = row + num_tokens[r]
        begin = 0
        while begin < size:
            end = begin + 1
            while end < size and parents[first + end] == end - 1:
                end += 1
            last = root + 1 + depths[first + end - 1]
            need = 0 if begin == 0 else last // block_size - root // block_size + 1
            if num_taken + need > num_scratch:
                num_dropped += size - begin
                break
            # The root belongs to the first segment; both keep the request's own slots.
            query_starts[v] = row if begin == 0 else row + 1 + begin
            request_of[v], seq_lens[v], scratch_starts[v] = r, last + 1, num_taken
            num_taken += need
            v += 1
            begin = end
        if size > 0:
            kept[r] = begin
        # What is left is computed where vLLM put it, and ignored: its slots lie behind every slot
        # of the first segment, so it harms nothing. All of a request without branches is left.
        left = row if size == 0 else row + 1 + begin
        if left < end_row:
            query_starts[v] = left
            request_of[v], seq_lens[v], scratch_starts[v] = r, root + num_tokens[r], num_taken
            v += 1
    query_starts[v], scratch_starts[v] = end_row, num_taken
    longest_query = longest_seq = 0
    for virtual in range(v):
        longest_query = max(longest_query, query_starts[virtual + 1] - query_starts[virtual])
        longest_seq = max(longest_seq, seq_lens[virtual])
    return (
        request_of[:v],
        query_starts[: v + 1],
        seq_lens[:v],
        scratch_starts[: v + 1],
        kept,
        num_dropped,
        longest_query,
        longest_seq,
    )


@kernel
def place(  # type: ignore[no-untyped-def]
    request_of,
    query_starts,
    scratch_starts,
    first_rows,
    num_computed,
    starts,
    parents,
    depths,
    tails,
    scratch,
    block_size,
):
    """Say where the virtual requests with scratch blocks have their KV.

    Args:
        request_of: As of :func:`cut`, and the other arguments that it shares.
        query_starts: Likewise.
        scratch_starts: Likewise.
        first_rows: Likewise.
        num_computed: Likewise.
        starts: Likewise.
        parents: Likewise.
        depths: Likewise.
        tails: [num_requests] block in which a request's root lies; read where it has nodes.
        scratch: [n] free blocks.
        block_size: Likewise.

    Returns:
        ``rows``, ``positions``, ``slots``, ``shared_rows``, ``shared_slots``, ``tail_copies``,
        ``table_rows`` and ``table_columns`` of a :class:`.plan.TreePlan`.
    """
    num_nodes, num_taken = len(parents), scratch_starts[-1]
    most_shared = num_nodes + np.sum(depths)  # each node's ancestors, with the root
    rows, positions = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64)
    slots = np.empty(num_nodes, np.int64)
    shared_rows, shared_slots = np.empty(most_shared, np.int64), np.empty(most_shared, np.int64)
    tail_copies = np.empty((len(request_of), 2), np.int64)
    table_rows, table_columns = np.empty(num_taken, np.int64), np.empty(num_taken, np.int64)
    num_rows = num_shared = num_tails = 0
    for v in range(len(request_of)):
        taken = scratch[scratch_starts[v] : scratch_starts[v + 1]]
        if len(taken) == 0:
            continue
        r = request_of[v]
        row, root, first = first_rows[r], num_computed[r], starts[r]
        column, offset = root // block_size, root % block_size
        for i in range(len(taken)):
            table_rows[scratch_starts[v] + i] = v
            table_columns[scratch_starts[v] + i] = column + i
        if offset:
            tail_copies[num_tails, 0], tail_copies[num_tails, 1] = tails[r], taken[0]
            num_tails += 1
        begin, end = query_starts[v] - row - 1, query_starts[v + 1] - row - 1
        for node in range(begin, end):
            depth = depths[first + node] + 1
            rows[num_rows], positions[num_rows] = row + 1 + node, root + depth
            slots[num_rows] = _slot(taken, offset + depth, block_size)
            num_rows += 1
        ancestor = parents[first + begin]
        for depth in range(depths[first + begin], -1, -1):
            shared_rows[num_shared] = row + 1 + ancestor
            shared_slots[num_shared] = _slot(taken, offset + depth, block_size)
            num_shared += 1
            if depth > 0:  # else it is the root
                ancestor = parents[first + ancestor]
    return (
        rows[:num_rows],
        positions[:num_rows],
        slots[:num_rows],
        shared_rows[:num_shared],
        shared_slots[:num_shared],
        tail_copies[:num_tails],
        table_rows,
        table_columns,
    )


@kernel
def _slot(taken, place, block_size):  # type: ignore[no-untyped-def]
    """Of what lies `place` behind the beginning of the tail block, in the blocks taken for it."""
    return taken[place // block_size] * block_size + place % block_size


@kernel
def committed(  # type: ignore[no-untyped-def]
    query_starts,
    scratch_starts,
    table_blocks,
    table_columns,
    first_rows,
    num_computed,
    accepted,
    num_accepted,
    block_size,
):
    """Say where the KV of accepted nodes lies if it is not in their request's own blocks.

    Args:
        query_starts: As of :func:`cut`.
        scratch_starts: Likewise.
        table_blocks: [n] scratch blocks, as of :class:`.plan.TreePlan`.
        table_columns: As of :func:`place`.
        first_rows: As of :func:`cut`.
        num_computed: Likewise.
        accepted: [num_requests, n] nodes of the accepted paths.
        num_accepted: [num_requests] how many of them count.
        block_size: Likewise.

    Returns:
        Requests, scratch blocks and columns of the requests' block tables, an entry a block.
    """
    most = len(table_blocks)
    requests, blocks = np.empty(most, np.int64), np.empty(most, np.int64)
    columns = np.empty(most, np.int64)
    n = 0
    for r in range(len(first_rows)):
        length = num_accepted[r]
        if length == 0:
            continue
        last_row = first_rows[r] + 1 + accepted[r, length - 1]
        v = np.searchsorted(query_starts, last_row, "right") - 1
        root = num_computed[r]
        used = (root + length) // block_size - root // block_size + 1
        for i in range(scratch_starts[v], min(scratch_starts[v + 1], scratch_starts[v] + used)):
            requests[n], blocks[n], columns[n] = r, table_blocks[i], table_columns[i]
            n += 1
    return requests[:n], blocks[:n], columns[:n]
