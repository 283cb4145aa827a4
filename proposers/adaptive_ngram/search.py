# SPDX-License-Identifier: Apache-2.0
"""Search for the draft tree: best-first, MCTS as in ADED, or the single greedy path.

Best-first takes nodes in the order of their path probability, which is exact for the n-gram model.
MCTS follows ADED (its selection rule, expansion of all successors at once, output by visits), but
without roll-outs: in the published code the value term is constant, so it cancels out of PUCT,
``(c1 + ln((N + c2 + 1) / c2)) * P * sqrt(N) / (1 + n)``, and with it everything that siblings
share: what is left is the largest ``P / (1 + n)``. Hence no randomness either.
All arrays are allocated once; nothing grows during a search.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.compiled import kernel
from vllm_spec_ext.proposers.adaptive_ngram.lookup import MAX_ROW, Lookup, successors
from vllm_spec_ext.proposers.adaptive_ngram.overlay import OverlayArrays
from vllm_spec_ext.proposers.adaptive_ngram.tree_order import depth_first, published_cut
from vllm_spec_ext.proposers.corpus.store import BaseArrays

CHAIN, BEST_FIRST, MCTS = 0, 1, 2
MCTS_ENTRIES = 1 << 15


class Search(NamedTuple):
    """Settings of a search."""

    mode: int
    max_depth: int
    min_confidence: float
    iterations: int
    max_sequences: int  # 0 = fill the budget
    greedy_extension: bool


class Scratch(NamedTuple):
    """Work arrays, reused by every search: C entries or nodes, M nodes of a draft."""

    row_tokens: NDArray[np.int32]  # [C] of which MAX_ROW are used
    token: NDArray[np.int32]  # [C]
    parent: NDArray[np.int32]  # [C]
    depth: NDArray[np.int32]  # [C]
    visits: NDArray[np.int32]  # [C]
    first_child: NDArray[np.int32]  # [C] -1 = not expanded
    row_end: NDArray[np.int32]  # [C] end of a node's children; best-first: of an entry's row
    num_seen: NDArray[np.int32]  # [C] children that were visited; always the first ones
    visited: NDArray[np.int32]  # [C] mcts: nodes in the order of their first visit
    tally: NDArray[np.int32]  # [C] mcts: nodes by number of visits
    heap: NDArray[np.int32]  # [C]
    place: NDArray[np.int32]  # [C] mcts: index in the draft, -1 = not drafted
    row_probs: NDArray[np.float32]  # [C] of which MAX_ROW are used
    prob: NDArray[np.float32]  # [C] of the path
    weight: NDArray[np.float32]  # [C] mcts: of the node alone
    score: NDArray[np.float32]  # [C] mcts: weight / (1 + visits), kept up to date
    node_tokens: NDArray[np.int32]  # [M] the draft before it is ordered
    node_parents: NDArray[np.int32]  # [M]
    node_source: NDArray[np.int32]  # [M]
    node_probs: NDArray[np.float32]  # [M]
    order: NDArray[np.int32]  # [4, M] for depth_first


class Memory(NamedTuple):
    """What :class:`Scratch` is made of: few arrays, as passing each to a kernel costs 0.2 us."""

    integers: NDArray[np.int32]  # [12, C]
    reals: NDArray[np.float32]  # [4, C]
    drafts: NDArray[np.int32]  # [7, M]
    draft_probs: NDArray[np.float32]  # [M]


@kernel
def scratch_of(memory: Memory) -> Scratch:
    """Views of the memory."""
    integers, reals, drafts = memory.integers, memory.reals, memory.drafts
    return Scratch(
        integers[0],
        integers[1],
        integers[2],
        integers[3],
        integers[4],
        integers[5],
        integers[6],
        integers[7],
        integers[8],
        integers[9],
        integers[10],
        integers[11],
        reals[0],
        reals[1],
        reals[2],
        reals[3],
        drafts[0],
        drafts[1],
        drafts[2],
        memory.draft_probs,
        drafts[3:],
    )


def make_memory(max_nodes: int) -> Memory:
    """Memory for drafts of at most ``max_nodes`` nodes."""
    capacity = max(MCTS_ENTRIES, (max_nodes + 1) * MAX_ROW)
    # The published cut first collects up to 2 * 256 nodes, then drops some.
    drafted = max(max_nodes, 512)
    return Memory(
        integers=np.zeros((12, capacity), np.int32),
        reals=np.zeros((4, capacity), np.float32),
        drafts=np.zeros((7, drafted), np.int32),
        draft_probs=np.zeros(drafted, np.float32),
    )


@kernel
def above(prob: NDArray[np.float32], a: int, b: int) -> bool:
    """Whether candidate a is taken before b: more probable, or older."""
    return prob[a] > prob[b] or (prob[a] == prob[b] and a < b)


@kernel
def heap_push(heap: NDArray[np.int32], size: int, prob: NDArray[np.float32], item: int) -> int:
    """Push a candidate; returns the new size."""
    hole = size
    while hole > 0:
        up = (hole - 1) >> 1
        if not above(prob, item, heap[up]):
            break
        heap[hole] = heap[up]
        hole = up
    heap[hole] = item
    return size + 1


@kernel
def heap_pop(heap: NDArray[np.int32], size: int, prob: NDArray[np.float32]) -> int:
    """Remove the best candidate, ``heap[0]``; returns the new size."""
    size -= 1
    item = heap[size]
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        if child + 1 < size and above(prob, heap[child + 1], heap[child]):
            child += 1
        if not above(prob, heap[child], item):
            break
        heap[hole] = heap[child]
        hole = child
    heap[hole] = item
    return size


@kernel
def argmax_row(probs: NDArray[np.float32], count: int) -> int:
    """Place of the highest of the first ``count`` probabilities; the first one on ties."""
    best = 0
    for place in range(1, count):
        if probs[place] > probs[best]:
            best = place
    return best


@kernel
def bring_best(tokens: NDArray[np.int32], probs: NDArray[np.float32], first: int, end: int) -> None:
    """Move the best of entries [first, end) to ``first``; the others keep their order.

    A row is sorted only as far as it is looked at; the oldest entry comes first on ties.
    """
    best = first
    prob = probs[first]
    for place in range(first + 1, end):
        if probs[place] > prob:
            best = place
            prob = probs[place]
    token = tokens[best]
    while best > first:
        tokens[best] = tokens[best - 1]
        probs[best] = probs[best - 1]
        best -= 1
    tokens[first] = token
    probs[first] = prob


@kernel
def search_chain(
    w1: int,
    w2: int,
    budget: int,
    base: BaseArrays,
    request: OverlayArrays,
    slot: int,
    shared: OverlayArrays,
    lookup: Lookup,
    search: Search,
    s: Scratch,
) -> int:
    """The greedy path, to where its probability falls under the threshold; returns its length."""
    count = 0
    path = 1.0
    while count < min(budget, search.max_depth):
        n = successors(base, request, slot, shared, lookup, w1, w2, s.row_tokens, s.row_probs)
        if n == 0:
            break
        best = argmax_row(s.row_probs, n)
        path *= s.row_probs[best]
        if path < search.min_confidence:
            break
        s.node_tokens[count] = s.row_tokens[best]
        s.node_parents[count] = count - 1
        s.node_probs[count] = path
        w1 = w2
        w2 = s.row_tokens[best]
        count += 1
    return count


@kernel
def push_next(entry: int, size: int, search: Search, s: Scratch) -> int:
    """Push the best entry of a row from ``entry`` on, if it is good enough; the new heap size."""
    end = s.row_end[entry]
    if entry >= end:
        return size
    bring_best(s.token, s.prob, entry, end)
    if s.prob[entry] < search.min_confidence or s.prob[entry] <= 0.0:
        return size
    return heap_push(s.heap, size, s.prob, entry)


@kernel
def search_best_first(
    w1: int,
    w2: int,
    budget: int,
    base: BaseArrays,
    request: OverlayArrays,
    slot: int,
    shared: OverlayArrays,
    lookup: Lookup,
    search: Search,
    s: Scratch,
) -> int:
    """The ``budget`` nodes of highest path probability; returns their number.

    Of each row only the best entry that is left stands in the heap. Entries of older rows have
    smaller numbers, so that equals are taken in the order in which they were found.
    """
    count = 0
    entries = 0
    size = 0
    parent = -1
    path = np.float32(1.0)
    depth = 0
    last = w2
    while True:
        if depth < search.max_depth and entries + MAX_ROW <= len(s.token):
            tokens = s.token[entries : entries + MAX_ROW]
            probs = s.prob[entries : entries + MAX_ROW]
            n = successors(base, request, slot, shared, lookup, w1, w2, tokens, probs)
            for place in range(n):
                probs[place] *= path
            s.row_end[entries] = entries + n
            s.parent[entries] = parent
            s.depth[entries] = depth + 1
            size = push_next(entries, size, search, s)
            entries += n
        if size == 0:
            return count
        item = s.heap[0]
        size = heap_pop(s.heap, size, s.prob)
        s.node_tokens[count] = s.token[item]
        s.node_parents[count] = s.parent[item]
        s.node_probs[count] = s.prob[item]
        # The context of the next look-up: the node's own token and the one before it.
        up = s.parent[item]
        w1 = s.node_tokens[up] if up >= 0 else last
        w2 = s.token[item]
        parent = count
        path = s.prob[item]
        depth = s.depth[item]
        count += 1
        if count >= budget:
            return count
        after = item + 1
        if after < s.row_end[item]:
            s.row_end[after] = s.row_end[item]
            s.parent[after] = up
            s.depth[after] = depth
            size = push_next(after, size, search, s)


@kernel
def expand(
    node: int,
    w1: int,
    w2: int,
    count: int,
    base: BaseArrays,
    request: OverlayArrays,
    slot: int,
    shared: OverlayArrays,
    lookup: Lookup,
    s: Scratch,
) -> int:
    """Make all successors children of a node, if there is room; returns the number of nodes."""
    s.first_child[node] = count
    s.row_end[node] = count
    if count + MAX_ROW > len(s.token):
        return count
    tokens = s.token[count : count + MAX_ROW]
    weights = s.weight[count : count + MAX_ROW]
    n = successors(base, request, slot, shared, lookup, w1, w2, tokens, weights)
    s.row_end[node] = count + n
    return count + n


@kernel
def grow_tree(
    w1: int,
    w2: int,
    max_depth: int,
    base: BaseArrays,
    request: OverlayArrays,
    slot: int,
    shared: OverlayArrays,
    lookup: Lookup,
    iterations: int,
    s: Scratch,
) -> int:
    """Run MCTS from the root, node 0; returns the number of visited nodes, the root included.

    A node's successors are looked up at its second visit: before that nothing reads them. They
    become nodes one by one, the most probable first, so visited siblings stand side by side.
    ``visited`` receives all visited nodes in the order of their first visit.
    """
    s.token[0] = w2
    s.parent[0] = -1
    s.prob[0] = 1.0
    s.depth[0] = 0
    s.visits[0] = 0
    s.num_seen[0] = 0
    s.visited[0] = 0
    num_visited = 1
    count = expand(0, w1, w2, 1, base, request, slot, shared, lookup, s)
    if count == 1:
        return 1
    for _ in range(iterations):
        node = 0
        while True:
            first = s.first_child[node]
            if first < 0:
                if s.depth[node] >= max_depth:
                    break
                before = s.token[s.parent[node]]
                count = expand(
                    node, before, s.token[node], count, base, request, slot, shared, lookup, s
                )
                first = s.first_child[node]
            end = s.row_end[node]
            if first == end:
                break
            child = first + s.num_seen[node]
            if child < end:  # unvisited children come first
                bring_best(s.token, s.weight, child, end)
                s.num_seen[node] += 1
                s.parent[child] = node
                s.prob[child] = s.prob[node] * s.weight[child]
                s.depth[child] = s.depth[node] + 1
                s.visits[child] = 0
                s.num_seen[child] = 0
                s.first_child[child] = -1
                s.visited[num_visited] = child
                num_visited += 1
                node = child
                break
            best = first
            value = s.score[first]
            for child in range(first + 1, end):
                if s.score[child] > value:
                    value = s.score[child]
                    best = child
            node = best
        while node >= 0:
            s.visits[node] += 1
            s.score[node] = s.weight[node] / np.float32(1 + s.visits[node])
            node = s.parent[node]
    return num_visited


@kernel
def rank_by_visits(num_visited: int, s: Scratch) -> int:
    """Write the visited nodes but the root into ``heap``, most visited first; their number.

    A counting sort. Among equals, children of the parent that was visited first come first, then
    the more probable sibling. A parent has been visited at least as often as its child and comes
    before it.
    """
    s.tally[: s.visits[0] + 2] = 0
    for index in range(1, num_visited):
        s.tally[s.visits[s.visited[index]]] += 1
    position = 0
    for visits in range(s.visits[0], -1, -1):
        number = s.tally[visits]
        s.tally[visits] = position
        position += number
    for index in range(num_visited):
        parent = s.visited[index]
        first = s.first_child[parent]
        for node in range(first, first + s.num_seen[parent]):
            s.heap[s.tally[s.visits[node]]] = node
            s.tally[s.visits[node]] += 1
    return num_visited - 1


@kernel
def search_mcts(
    w1: int,
    w2: int,
    budget: int,
    base: BaseArrays,
    request: OverlayArrays,
    slot: int,
    shared: OverlayArrays,
    lookup: Lookup,
    search: Search,
    s: Scratch,
) -> int:
    """The most visited nodes of an MCTS tree; returns their number."""
    max_depth = search.max_depth - (1 if search.greedy_extension else 0)
    num_visited = grow_tree(
        w1, w2, max_depth, base, request, slot, shared, lookup, search.iterations, s
    )
    num_ranked = rank_by_visits(num_visited, s)
    limit = search.max_sequences - 1 if search.max_sequences > 0 else budget
    room = len(s.node_tokens) if search.max_sequences > 0 else budget
    count = 0
    s.place[0] = -1
    for rank in range(num_ranked):
        node = s.heap[rank]
        if count >= limit:
            break
        s.place[node] = -1
        if s.prob[node] < search.min_confidence:
            continue
        s.place[node] = count
        s.node_tokens[count] = s.token[node]
        s.node_parents[count] = s.place[s.parent[node]]
        s.node_probs[count] = s.prob[node]
        s.node_source[count] = node
        s.order[0, count] = count
        count += 1
    selected = count
    if search.greedy_extension:
        count = extend(selected, room, base, request, slot, shared, lookup, search, s)
    if search.max_sequences > 0:
        count = published_cut(s.node_tokens, s.node_parents, s.node_probs, selected, count, s.order)
    return min(count, budget)


@kernel
def extend(
    selected: int,
    room: int,
    base: BaseArrays,
    request: OverlayArrays,
    slot: int,
    shared: OverlayArrays,
    lookup: Lookup,
    search: Search,
    s: Scratch,
) -> int:
    """Add to each selected node its most probable next token; returns the number of nodes.

    One that is selected already is not added again. ``order[0]`` receives, for each selected node,
    the node that ends its sequence.
    """
    count = selected
    for index in range(selected):
        if count >= room:
            break
        node = s.node_source[index]
        w1 = s.token[s.parent[node]]
        w2 = s.token[node]
        n = successors(base, request, slot, shared, lookup, w1, w2, s.row_tokens, s.row_probs)
        if n == 0:
            continue
        best = argmax_row(s.row_probs, n)
        path = s.node_probs[index] * s.row_probs[best]
        known = -1
        for other in range(selected):
            if s.node_parents[other] == index and s.node_tokens[other] == s.row_tokens[best]:
                known = other
        if known >= 0:
            s.order[0, index] = known
        elif path >= search.min_confidence:
            s.order[0, index] = count
            s.node_tokens[count] = s.row_tokens[best]
            s.node_parents[count] = index
            s.node_probs[count] = path
            count += 1
    return count


class Results(NamedTuple):
    """The drafts of a batch, in depth-first order."""

    tokens: NDArray[np.int32]  # [num_reqs, M]
    parents: NDArray[np.int32]  # [num_reqs, M]
    probs: NDArray[np.float32]  # [num_reqs, M] of the paths
    counts: NDArray[np.int64]  # [num_reqs] nodes


@kernel
def one_slot(arrays: OverlayArrays, slot: int) -> OverlayArrays:
    """An overlay of a pool, alone: what a request's search reads holds nothing of others."""
    end = slot + 1
    return OverlayArrays(
        arrays.keys[slot:end],
        arrays.stamps[slot:end],
        arrays.tokens[slot:end],
        arrays.weights[slot:end],
        arrays.clocks[slot:end],
        arrays.generations[slot:end],
        arrays.evictions[slot:end],
    )


@kernel
def search_batch(
    requests: NDArray[np.int64],
    num: int,
    base: BaseArrays,
    request: OverlayArrays,
    shared: OverlayArrays,
    settings: NDArray[np.float64],
    memory: Memory,
    results: Results,
) -> None:
    """Draft for each request of a batch, serially; reads the overlays, writes only its outputs.

    Args:
        requests: [>= num, 5] int64 second-last token (-1 = none), last token, overlay (-1 = none),
            most nodes and shared overlay (-1 = none) of each request.
        num: Number of requests.
        base: The store.
        request: Overlays by request.
        shared: The shared overlays.
        settings: [15] float64 the fields of :class:`Lookup`, then those of :class:`Search`.
        memory: Work arrays.
        results: Filled.
    """
    search = Search(
        int(settings[9]),
        int(settings[10]),
        settings[11],
        int(settings[12]),
        int(settings[13]),
        settings[14] != 0.0,
    )
    s = scratch_of(memory)
    for index in range(num):
        results.counts[index] = 0
        w1, w2, slot = requests[index, 0], requests[index, 1], requests[index, 2]
        budget = min(requests[index, 3], results.tokens.shape[1])
        if budget <= 0 or w2 < 0 or w2 >= int(settings[0]):
            continue
        group = requests[index, 4]
        lookup = Lookup(
            int(settings[0]),
            int(settings[1]),
            settings[2],
            settings[3],
            settings[4] if group >= 0 else 0.0,
            settings[5],
            settings[6],
            settings[7] != 0.0,
            settings[8],
        )
        own = one_slot(shared, max(group, 0))
        if search.mode == 0:
            count = search_chain(w1, w2, budget, base, request, slot, own, lookup, search, s)
        elif search.mode == 1:
            count = search_best_first(w1, w2, budget, base, request, slot, own, lookup, search, s)
        else:
            count = search_mcts(w1, w2, budget, base, request, slot, own, lookup, search, s)
        depth_first(
            s.node_tokens,
            s.node_parents,
            s.node_probs,
            count,
            s.order,
            results.tokens[index],
            results.parents[index],
            results.probs[index],
        )
        results.counts[index] = count


def settings_array(lookup: Lookup, search: Search) -> NDArray[np.float64]:
    """The settings as :func:`search_batch` takes them: one array passes in a tenth of the time."""
    return np.array([*lookup, *search], np.float64)
