# SPDX-License-Identifier: Apache-2.0
"""The best draft tree from independent heads: pure array code, no model.

The heads of one position predict each following token without knowing the others, so a path's
probability is taken as the product of its tokens' and the tree is a tree of *candidate ranks*:
below every node of depth i hang the same candidates of head i + 1. The n nodes with the largest
path probabilities maximise the expected number of accepted tokens, because that number is the
sum of the nodes' path probabilities; and they are always a tree, because a parent is never less
likely than its child.
"""

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.compiled import kernel


@kernel
def best_tree(
    log_probs: NDArray[np.float32],  # [num_heads, candidates] float32, each row descending
    budget: int,
    min_log_prob: float,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """The ``budget`` most likely paths' end nodes, as one tree in depth-first pre-order.

    Args:
        log_probs: Natural logarithms; row i are head i's candidates, most likely first.
        budget: Most nodes.
        min_log_prob: Nodes whose path is less likely than this are left out; ``-inf`` keeps all.

    Returns:
        ``(depths, ranks, parents)``, [n] int32 each: the head a node comes from, its candidate
        number, and its parent node (-1 = the last verified token). The first path follows the
        likeliest node at every depth; a parent stands before its children.
    """
    nodes = _best_first(log_probs, budget, min_log_prob)
    return depth_first(nodes)


@kernel
def path_log_probs(
    log_probs: NDArray[np.float32],
    depths: NDArray[np.int32],
    ranks: NDArray[np.int32],
    parents: NDArray[np.int32],
) -> NDArray[np.float32]:
    """[n] float32 log-probability of the path to each node of a tree from :func:`best_tree`."""
    paths = np.empty(len(parents), np.float32)
    for node in range(len(parents)):
        above = paths[parents[node]] if parents[node] >= 0 else np.float32(0.0)
        paths[node] = above + log_probs[depths[node], ranks[node]]
    return paths


@kernel
def _best_first(
    log_probs: NDArray[np.float32], budget: int, min_log_prob: float
) -> NDArray[np.int32]:
    """Nodes in the order of their probability: [n, 3] parent, depth, rank.

    A node enters the frontier with its parent (the first child) or with its likelier sibling, so
    the frontier grows by at most one node a step. Ties go to the node found first.
    """
    num_heads, num_candidates = log_probs.shape
    nodes = np.empty((budget, 3), np.int32)
    scores = np.empty(budget, np.float64)
    # Entries stay where they arrived (taken ones fall to -inf), so that ties are deterministic;
    # a scan of some tens of floats is cheaper than a heap.
    frontier = np.empty((2 * budget + 1, 3), np.int32)
    waiting = np.empty(2 * budget + 1, np.float64)
    frontier[0, 0], frontier[0, 1], frontier[0, 2] = -1, 0, 0
    waiting[0] = log_probs[0, 0]
    found = 1
    for node in range(budget):
        best = np.argmax(waiting[:found])
        score = waiting[best]
        if score < min_log_prob or score == -np.inf:
            return nodes[:node]
        waiting[best] = -np.inf
        parent, depth, rank = frontier[best]
        nodes[node, 0], nodes[node, 1], nodes[node, 2] = parent, depth, rank
        scores[node] = score
        if depth + 1 < num_heads:
            frontier[found, 0], frontier[found, 1], frontier[found, 2] = node, depth + 1, 0
            waiting[found] = score + log_probs[depth + 1, 0]
            found += 1
        if rank + 1 < num_candidates:
            above = scores[parent] if parent >= 0 else 0.0
            frontier[found, 0], frontier[found, 1], frontier[found, 2] = parent, depth, rank + 1
            waiting[found] = above + log_probs[depth, rank + 1]
            found += 1
    return nodes


@kernel
def depth_first(
    nodes: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """``(depths, ranks, parents)`` of nodes as they were found, in depth-first pre-order.

    Args:
        nodes: [n, 3] parent, depth, rank; siblings were found in the order of their probability, so
            the likeliest is first.
    """
    count = len(nodes)
    depths = np.empty(count, np.int32)
    ranks = np.empty(count, np.int32)
    parents = np.empty(count, np.int32)
    place = np.full(count, -1, np.int32)  # where a node of ``nodes`` stands in the output
    stack = np.empty(count + 1, np.int32)
    stack[0] = -1  # the root
    height, written = 1, 0
    while height > 0:
        height -= 1
        node = stack[height]
        if node >= 0:
            above = nodes[node, 0]
            place[node] = written
            parents[written] = place[above] if above >= 0 else -1
            depths[written], ranks[written] = nodes[node, 1], nodes[node, 2]
            written += 1
        for child in range(count - 1, node, -1):
            if nodes[child, 0] == node:
                stack[height] = child
                height += 1
    return depths, ranks, parents
