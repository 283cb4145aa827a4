# SPDX-License-Identifier: Apache-2.0
"""The best draft tree from independent heads: pure array code, no model.

The heads of one position predict each following token without knowing the others, so a path's
probability is taken as the product of its tokens' and the tree is a tree of *candidate ranks*:
below every node of depth i hang the same candidates of head i + 1. The n nodes with the largest
path probabilities maximise the expected number of accepted tokens, because that number is the
sum of the nodes' path probabilities; and they are always a tree, because a parent is never less
likely than its child.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from numba import njit
except ImportError:  # evaluating heads on a bare training machine: the same code, interpreted

    def njit(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:  # type: ignore[no-redef]
        """Leave the function as it is."""
        return lambda function: function


@njit(cache=True, nogil=True)
def best_tree(
    log_probs: NDArray[np.float32],  # [num_heads, candidates] float32, each row descending
    budget: int,
    min_log_prob: float,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """The ``budget`` most likely paths' end nodes, as one tree in depth-first pre-order.

    Best-first search. A node enters the frontier with its parent's first child or after its more
    likely sibling, so the frontier never holds more than ``2 * budget + 1`` nodes. Ties go to the
    node found first, which makes the result deterministic.

    Args:
        log_probs: Natural logarithms; row i are head i's candidates, most likely first.
        budget: Most nodes.
        min_log_prob: Nodes whose path is less likely than this are left out; ``-inf`` keeps all.

    Returns:
        ``(depths, ranks, parents)``, [n] int32 each: the head a node comes from, its candidate
        number, and its parent node (-1 = the last verified token). The first path is the most
        likely one; a parent stands before its children.
    """
    num_heads, num_candidates = log_probs.shape
    size = 2 * budget + 2
    score = np.empty(size, np.float64)
    parent = np.empty(size, np.int32)  # in order of discovery of taken nodes
    depth = np.empty(size, np.int32)
    rank = np.empty(size, np.int32)
    frontier = 0
    taken = 0
    took_score = np.empty(budget, np.float64)
    took_parent = np.empty(budget, np.int32)
    took_depth = np.empty(budget, np.int32)
    took_rank = np.empty(budget, np.int32)
    if num_heads > 0 and num_candidates > 0:
        score[0], parent[0], depth[0], rank[0] = log_probs[0, 0], -1, 0, 0
        frontier = 1
    while taken < budget and frontier > 0:
        # The frontier is tens of entries: a scan beats a heap's bookkeeping.
        best = 0
        for i in range(1, frontier):
            if score[i] > score[best]:
                best = i
        s, p, d, r = score[best], parent[best], depth[best], rank[best]
        if s < min_log_prob:
            break
        for i in range(best, frontier - 1):  # keep the order of arrival: ties stay deterministic
            score[i], parent[i], depth[i], rank[i] = (
                score[i + 1],
                parent[i + 1],
                depth[i + 1],
                rank[i + 1],
            )
        frontier -= 1
        node = taken
        took_score[node], took_parent[node], took_depth[node], took_rank[node] = s, p, d, r
        taken += 1
        if d + 1 < num_heads:
            score[frontier] = s + log_probs[d + 1, 0]
            parent[frontier], depth[frontier], rank[frontier] = node, d + 1, 0
            frontier += 1
        if r + 1 < num_candidates:
            above = took_score[p] if p >= 0 else 0.0
            score[frontier] = above + log_probs[d, r + 1]
            parent[frontier], depth[frontier], rank[frontier] = p, d, r + 1
            frontier += 1
    # Depth-first order. Children of a node were taken in rank order, so the first is the likeliest.
    out_depth = np.empty(taken, np.int32)
    out_rank = np.empty(taken, np.int32)
    out_parent = np.empty(taken, np.int32)
    place = np.full(taken + 1, -1, np.int32)  # taken node -> output node; [-1] stays -1 for the root
    stack = np.empty(taken + 1, np.int32)
    top = 0
    for node in range(taken - 1, -1, -1):
        if took_parent[node] == -1:
            stack[top] = node
            top += 1
    written = 0
    while top > 0:
        top -= 1
        node = stack[top]
        place[node] = written
        out_depth[written], out_rank[written] = took_depth[node], took_rank[node]
        out_parent[written] = -1 if took_parent[node] == -1 else place[took_parent[node]]
        written += 1
        for child in range(taken - 1, node, -1):
            if took_parent[child] == node:
                stack[top] = child
                top += 1
    return out_depth, out_rank, out_parent
