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

from vllm_spec_ext.proposers.adaptive_ngram.jit import kernel
from vllm_spec_ext.proposers.adaptive_ngram.lookup import MAX_ROW, Lookup, successors
from vllm_spec_ext.proposers.adaptive_ngram.overlay import OverlayArrays
from vllm_spec_ext.proposers.adaptive_ngram.store import BaseArrays
from vllm_spec_ext.proposers.adaptive_ngram.tree_order import depth_first, published_cut

CHAIN, BEST_FIRST, MCTS = 0, 1, 2
MCTS_NODES = 4096


class Search(NamedTuple):
    """Settings of a search."""

    mode: int
    max_depth: int
    min_confidence: float
    iterations: int
    max_sequences: int  # 0 = fill the budget
    greedy_extension: bool


class Scratch(NamedTuple):
    """Work arrays, reused by every search; capacity C nodes or candidates."""

    row_tokens: NDArray[np.int32]  # [MAX_ROW]
    row_probs: NDArray[np.float32]  # [MAX_ROW]
    token: NDArray[np.int32]  # [C]
    parent: NDArray[np.int32]  # [C]
    prob: NDArray[np.float32]  # [C] of the path
    depth: NDArray[np.int32]  # [C]
    weight: NDArray[np.float32]  # [C] mcts: of the node alone
    score: NDArray[np.float32]  # [C] mcts: weight / (1 + visits), kept up to date
    visits: NDArray[np.int32]  # [C]
    first_child: NDArray[np.int32]  # [C] -1 = not expanded
    num_children: NDArray[np.int32]  # [C]
    num_seen: NDArray[np.int32]  # [C] children that were visited; always the first ones
    heap: NDArray[np.int32]  # [C]
    place: NDArray[np.int32]  # [C] mcts: index in the draft, -1 = not drafted
    node_tokens: NDArray[np.int32]  # [M] the draft before it is ordered
    node_parents: NDArray[np.int32]  # [M]
    node_probs: NDArray[np.float32]  # [M]
    node_source: NDArray[np.int32]  # [M]
    order: NDArray[np.int32]  # [4, M] for depth_first


def make_scratch(max_nodes: int) -> Scratch:
    """Work arrays for drafts of at most ``max_nodes`` nodes."""
    capacity = max(MCTS_NODES, (max_nodes + 1) * MAX_ROW)
    # The published cut first collects up to 2 * 256 nodes, then drops some.
    drafted = max(max_nodes, 512)
    return Scratch(
        row_tokens=np.zeros(MAX_ROW, np.int32),
        row_probs=np.zeros(MAX_ROW, np.float32),
        token=np.zeros(capacity, np.int32),
        parent=np.zeros(capacity, np.int32),
        prob=np.zeros(capacity, np.float32),
        depth=np.zeros(capacity, np.int32),
        weight=np.zeros(capacity, np.float32),
        score=np.zeros(capacity, np.float32),
        visits=np.zeros(capacity, np.int32),
        first_child=np.zeros(capacity, np.int32),
        num_children=np.zeros(capacity, np.int32),
        num_seen=np.zeros(capacity, np.int32),
        heap=np.zeros(capacity, np.int32),
        place=np.zeros(capacity, np.int32),
        node_tokens=np.zeros(drafted, np.int32),
        node_parents=np.zeros(drafted, np.int32),
        node_probs=np.zeros(drafted, np.float32),
        node_source=np.zeros(drafted, np.int32),
        order=np.zeros((4, drafted), np.int32),
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
def sort_row(tokens: NDArray[np.int32], probs: NDArray[np.float32], count: int) -> None:
    """Stable insertion sort of a row, most probable first."""
    for place in range(1, count):
        token = tokens[place]
        prob = probs[place]
        hole = place
        while hole > 0 and probs[hole - 1] < prob:
            tokens[hole] = tokens[hole - 1]
            probs[hole] = probs[hole - 1]
            hole -= 1
        tokens[hole] = token
        probs[hole] = prob


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
    """The ``budget`` nodes of highest path probability; returns their number."""
    count = 0
    candidates = 0
    size = 0
    parent = -1
    path = 1.0
    depth = 0
    last = w2
    while True:
        if depth < search.max_depth:
            n = successors(base, request, slot, shared, lookup, w1, w2, s.row_tokens, s.row_probs)
            for place in range(n):
                prob = path * s.row_probs[place]
                if prob >= search.min_confidence and prob > 0.0 and candidates < len(s.token):
                    s.token[candidates] = s.row_tokens[place]
                    s.parent[candidates] = parent
                    s.prob[candidates] = prob
                    s.depth[candidates] = depth + 1
                    size = heap_push(s.heap, size, s.prob, candidates)
                    candidates += 1
        if size == 0 or count >= budget:
            return count
        item = s.heap[0]
        size = heap_pop(s.heap, size, s.prob)
        s.node_tokens[count] = s.token[item]
        s.node_parents[count] = s.parent[item]
        s.node_probs[count] = s.prob[item]
        parent = count
        path = s.prob[item]
        depth = s.depth[item]
        # The context of the next look-up: the node's own token and the one before it.
        up = s.parent[item]
        w1 = s.node_tokens[up] if up >= 0 else last
        w2 = s.token[item]
        count += 1
        if count >= budget:
            return count


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
    s.num_children[node] = 0
    s.num_seen[node] = 0
    n = successors(base, request, slot, shared, lookup, w1, w2, s.row_tokens, s.row_probs)
    if count + n > len(s.token):
        return count
    sort_row(s.row_tokens, s.row_probs, n)
    for place in range(n):
        child = count + place
        s.token[child] = s.row_tokens[place]
        s.parent[child] = node
        s.weight[child] = s.row_probs[place]
        s.score[child] = s.row_probs[place]
        s.prob[child] = s.prob[node] * s.row_probs[place]
        s.depth[child] = s.depth[node] + 1
        s.visits[child] = 0
        s.first_child[child] = -1
    s.num_children[node] = n
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
    """Run MCTS from the root, node 0; returns the number of nodes."""
    s.token[0] = w2
    s.parent[0] = -1
    s.prob[0] = 1.0
    s.depth[0] = 0
    s.visits[0] = 0
    count = expand(0, w1, w2, 1, base, request, slot, shared, lookup, s)
    if count == 1:
        return count
    for _ in range(iterations):
        node = 0
        while s.first_child[node] >= 0 and s.num_children[node] > 0:
            first = s.first_child[node]
            if s.num_seen[node] < s.num_children[node]:  # unvisited children come first
                best = first + s.num_seen[node]
                s.num_seen[node] += 1
            else:
                best = first
                value = np.float32(-1.0)
                for child in range(first, first + s.num_children[node]):
                    if s.score[child] > value:
                        value = s.score[child]
                        best = child
            node = best
        if s.first_child[node] < 0 and s.depth[node] < max_depth:
            before = s.token[s.parent[node]]
            count = expand(
                node, before, s.token[node], count, base, request, slot, shared, lookup, s
            )
        while node >= 0:
            s.visits[node] += 1
            s.score[node] = s.weight[node] / np.float32(1 + s.visits[node])
            node = s.parent[node]
    return count


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
    nodes = grow_tree(w1, w2, max_depth, base, request, slot, shared, lookup, search.iterations, s)
    # Counting sort by visits; nodes of equal visits keep their order of creation. A parent has
    # been visited at least as often as its child and was created before it, so it comes first.
    highest = 0
    for node in range(1, nodes):
        highest = max(highest, s.visits[node])
    s.num_seen[: highest + 1] = 0
    for node in range(1, nodes):
        s.num_seen[s.visits[node]] += 1
    position = 0
    for visits in range(highest, -1, -1):
        number = s.num_seen[visits]
        s.num_seen[visits] = position
        position += number
    for node in range(1, nodes):
        s.heap[s.num_seen[s.visits[node]]] = node
        s.num_seen[s.visits[node]] += 1
    limit = search.max_sequences - 1 if search.max_sequences > 0 else budget
    room = len(s.node_tokens) if search.max_sequences > 0 else budget
    count = 0
    s.place[0] = -1
    for rank in range(nodes - 1):
        node = s.heap[rank]
        if count >= limit or s.visits[node] == 0:
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


@kernel
def search_batch(
    contexts: NDArray[np.int32],
    slots: NDArray[np.int64],
    rooms: NDArray[np.int64],
    base: BaseArrays,
    request: OverlayArrays,
    shared: OverlayArrays,
    lookup: Lookup,
    search: Search,
    s: Scratch,
    out_tokens: NDArray[np.int32],
    out_parents: NDArray[np.int32],
    out_probs: NDArray[np.float32],
    out_counts: NDArray[np.int64],
) -> None:
    """Draft for each request of a batch, serially; reads the overlays, writes only its outputs.

    Args:
        contexts: [num_reqs, 2] int32 second-last (-1 = none) and last token.
        slots: [num_reqs] int64 overlay of each request, -1 = none.
        rooms: [num_reqs] int64 most nodes for each.
        base: The store.
        request: Overlays by request.
        shared: The shared overlay.
        lookup: Settings of look-ups.
        search: Settings of the search.
        s: Work arrays.
        out_tokens: [num_reqs, M] int32, filled in depth-first order.
        out_parents: [num_reqs, M] int32, filled.
        out_probs: [num_reqs, M] float32 path probabilities, filled.
        out_counts: [num_reqs] int64, filled.
    """
    for index in range(len(contexts)):
        out_counts[index] = 0
        w1 = int(contexts[index, 0])
        w2 = int(contexts[index, 1])
        budget = min(rooms[index], out_tokens.shape[1])
        if budget <= 0 or w2 < 0 or w2 >= lookup.vocab_size:
            continue
        slot = slots[index]
        if search.mode == 0:
            count = search_chain(w1, w2, budget, base, request, slot, shared, lookup, search, s)
        elif search.mode == 1:
            count = search_best_first(
                w1, w2, budget, base, request, slot, shared, lookup, search, s
            )
        else:
            count = search_mcts(w1, w2, budget, base, request, slot, shared, lookup, search, s)
        depth_first(
            s.node_tokens,
            s.node_parents,
            s.node_probs,
            count,
            s.order,
            out_tokens[index],
            out_parents[index],
            out_probs[index],
        )
        out_counts[index] = count
