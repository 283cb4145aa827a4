# SPDX-License-Identifier: Apache-2.0
"""The order of a draft's nodes, and the cut of ADED's published code."""

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.compiled import kernel

PUBLISHED_LIMIT = 64  # ADED's --num-draft


@kernel
def depth_first(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    probs: NDArray[np.float32],
    count: int,
    work: NDArray[np.int32],
    out_tokens: NDArray[np.int32],
    out_parents: NDArray[np.int32],
    out_probs: NDArray[np.float32],
) -> None:
    """Order nodes depth-first, so that the path of the best children comes first.

    Args:
        tokens: [>= count] int32, best siblings first, parents before children.
        parents: [>= count] int32, -1 = the last verified token.
        probs: [>= count] float32.
        count: Number of nodes.
        work: [4, >= count] int32, overwritten.
        out_tokens: [>= count] int32, filled.
        out_parents: [>= count] int32, filled.
        out_probs: [>= count] float32, filled.
    """
    first, sibling, stack, place = work[0], work[1], work[2], work[3]
    first[:count] = -1
    root = -1
    for node in range(count - 1, -1, -1):  # backwards, so that each list starts with its best
        up = parents[node]
        if up < 0:
            sibling[node] = root
            root = node
        else:
            sibling[node] = first[up]
            first[up] = node
    size = 0
    written = 0
    node = root
    while node >= 0 or size > 0:
        if node < 0:
            size -= 1
            node = stack[size]
            continue
        place[node] = written
        out_tokens[written] = tokens[node]
        out_parents[written] = place[parents[node]] if parents[node] >= 0 else -1
        out_probs[written] = probs[node]
        written += 1
        if sibling[node] >= 0:
            stack[size] = sibling[node]
            size += 1
        node = first[node]


@kernel
def num_distinct(tokens: NDArray[np.int32], parents: NDArray[np.int32], node: int) -> int:
    """Number of distinct tokens on the path to a node."""
    distinct = 0
    while node >= 0:
        repeated = False
        up = parents[node]
        while up >= 0:
            if tokens[up] == tokens[node]:
                repeated = True
            up = parents[up]
        if not repeated:
            distinct += 1
        node = parents[node]
    return distinct


@kernel
def published_cut(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    probs: NDArray[np.float32],
    selected: int,
    count: int,
    work: NDArray[np.int32],
) -> int:
    """Drop the longest sequences while all hold over 64 tokens, as REST's and ADED's code does.

    There is one sequence for each selected node, up to its extension; its size is its number of
    distinct tokens, so shared prefixes count again and again (as published).

    Args:
        tokens: [>= count] int32, changed in place.
        parents: [>= count] int32, changed in place.
        probs: [>= count] float32, changed in place.
        selected: Number of sequences.
        count: Number of nodes.
        work: [4, >= count] int32, the first row holds the last node of each sequence; the others
            are overwritten.

    Returns:
        Number of nodes left; parents still come before children.
    """
    end, size, keep, place = work[0], work[1], work[2], work[3]
    total = 0
    for index in range(selected):
        distinct = num_distinct(tokens, parents, end[index])
        size[index] = distinct
        total += distinct
    while total > PUBLISHED_LIMIT:
        longest = 0
        for index in range(selected):
            if size[index] >= size[longest]:
                longest = index
        if size[longest] == 0:
            break
        total -= size[longest]
        size[longest] = 0
    keep[:count] = 0
    for index in range(selected):
        node = end[index] if size[index] > 0 else -1
        while node >= 0:
            keep[node] = 1
            node = parents[node]
    left = 0
    for node in range(count):
        if keep[node] == 1:
            place[node] = left
            tokens[left] = tokens[node]
            parents[left] = place[parents[node]] if parents[node] >= 0 else -1
            probs[left] = probs[node]
            left += 1
    return left
