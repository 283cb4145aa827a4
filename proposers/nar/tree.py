# SPDX-License-Identifier: Apache-2.0
"""The best draft from slots whose candidates depend on the token before: pure array code.

The drafter gives, for each slot, the probability of each candidate behind each candidate of the
slot before. So a path's probability is the product along its edges, as in a Markov chain over a
trellis; the n nodes with the largest path probabilities maximise the expected number of accepted
tokens, and they are always a tree, because a parent is never less likely than its child.
"""

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.compiled import kernel
from vllm_spec_ext.proposers.blockwise.tree import depth_first


@kernel
def best_tree(
    log_probs: NDArray[np.float32],  # [num_slots, p, m] as of SlotCandidates; p = 1 or m
    budget: int,
    min_log_prob: float,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """The ``budget`` most likely paths' end nodes, as one tree in depth-first pre-order.

    Args:
        log_probs: Natural logarithms.
        budget: Most nodes.
        min_log_prob: Nodes whose path is less likely than this are left out; ``-inf`` keeps all.

    Returns:
        ``(slots, places, parents, paths)``, [n] each: the slot and the candidate of each node, its
        parent node (-1 = the last verified token), and the log-probability of its path. The first
        path follows the likeliest node at every depth; a parent stands before its children.
    """
    nodes = _best_first(log_probs, budget, min_log_prob)
    slots, places, parents = depth_first(nodes)
    paths = np.empty(len(parents), np.float32)
    for node in range(len(parents)):
        above, before = np.float32(0.0), 0
        if parents[node] >= 0:
            above, before = paths[parents[node]], places[parents[node]]
        row = before if log_probs.shape[1] > 1 else 0
        paths[node] = above + log_probs[slots[node], row, places[node]]
    return slots, places, parents, paths


@kernel
def _best_first(
    log_probs: NDArray[np.float32], budget: int, min_log_prob: float
) -> NDArray[np.int32]:
    """Nodes in the order of their probability: [n, 3] parent, slot, candidate.

    A node enters the frontier with its parent (the first child) or with its likelier sibling, so
    the frontier grows by at most one node a step. Ties go to the node found first.
    """
    num_slots, num_before, num_candidates = log_probs.shape
    nodes = np.empty((budget, 3), np.int32)
    scores = np.empty(budget, np.float64)
    orders = np.full((num_slots, num_before), False)  # rows that are sorted already
    sorted_places = np.empty(log_probs.shape, np.int64)
    # [parent, slot, row of log_probs, rank in its order]; entries stay where they arrived (taken
    # ones fall to -inf), so that ties are deterministic.
    frontier = np.empty((2 * budget + 1, 4), np.int32)
    waiting = np.empty(2 * budget + 1, np.float64)
    found, node = 0, -1
    while True:
        # Children of the node that was taken last, or of the root.
        slot = nodes[node, 1] + 1 if node >= 0 else 0
        if slot < num_slots:
            row = nodes[node, 2] if node >= 0 and num_before > 1 else 0
            if not orders[slot, row]:
                sorted_places[slot, row] = np.argsort(-log_probs[slot, row], kind="mergesort")
                orders[slot, row] = True
            frontier[found, 0], frontier[found, 1] = node, slot
            frontier[found, 2], frontier[found, 3] = row, 0
            above = scores[node] if node >= 0 else 0.0
            waiting[found] = above + log_probs[slot, row, sorted_places[slot, row, 0]]
            found += 1
        node += 1
        if node == budget or found == 0:
            return nodes[:node]
        best = np.argmax(waiting[:found])
        score = waiting[best]
        if score < min_log_prob or score == -np.inf:
            return nodes[:node]
        waiting[best] = -np.inf
        parent, slot, row, rank = frontier[best]
        nodes[node, 0], nodes[node, 1] = parent, slot
        nodes[node, 2] = sorted_places[slot, row, rank]
        scores[node] = score
        if rank + 1 < num_candidates:
            frontier[found, 0], frontier[found, 1] = parent, slot
            frontier[found, 2], frontier[found, 3] = row, rank + 1
            above = scores[parent] if parent >= 0 else 0.0
            waiting[found] = above + log_probs[slot, row, sorted_places[slot, row, rank + 1]]
            found += 1


def best_chain(
    log_probs: NDArray[np.float32],  # [num_slots, p, m] as of SlotCandidates
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The greedy walk: the likeliest candidate of each slot behind the one taken before it.

    Returns:
        ``(places, paths)``, [num_slots] each: the candidate of each slot, and the log-probability
        of the path to it.
    """
    places = np.empty(len(log_probs), np.int32)
    paths = np.empty(len(log_probs), np.float32)
    before, path = 0, 0.0
    for slot, rows in enumerate(log_probs):
        row = rows[before if len(rows) > 1 else 0]
        before = int(row.argmax())
        path += float(row[before])
        places[slot], paths[slot] = before, path
    return places, paths
