# SPDX-License-Identifier: Apache-2.0
"""Shapes of drawn trees, settled before a token is drawn."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Shape:
    """A tree without tokens; nodes in the order in which they are drawn, parents first."""

    parents: list[int] = field(default_factory=list)  # -1 = the last verified token
    ranks: list[int] = field(default_factory=list)  # place among the children of its parent
    depths: list[int] = field(default_factory=list)  # 0 = child of the root
    reach: list[float] = field(default_factory=list)  # probability that a node is accepted

    def __len__(self) -> int:
        return len(self.parents)

    def children(self, node: int) -> list[int]:
        """Children of a node, -1 = the root, in the order in which they are drawn."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


def expansion_size(expansion: Sequence[int]) -> int:
    """Nodes of a tree whose i-th step adds so many children to each node of the step before.

    Miao et al. 2024 (SpecInfer), sec. 3: <1, 1, 3> has 1 + 1 + 3 nodes.
    """
    size, width = 0, 1
    for children in expansion:
        width *= children
        size += width
    return size


def best_shapes(
    rates: Sequence[Sequence[float]],
    num_children: Callable[[int], int],
    max_depth: int,
    budget: int,
    min_reach: float = 0.0,
) -> list[Shape]:
    """The trees of several models that together are accepted furthest, by their rates so far.

    Nodes are taken in the order of their probability to be accepted. With a budget for all nodes,
    the whole expansion tree.

    Args:
        rates: [num_models][num_ranks] probability that the k-th child drawn by a model is accepted,
            given its parent.
        num_children: Most children of a node, by their depth.
        max_depth: Levels.
        budget: Most nodes of all models together.
        min_reach: Nodes that are accepted with a smaller probability are left out.

    Returns:
        One for each model; may be empty.
    """
    shapes = [Shape() for _ in rates]
    # (-reach, number, model, parent, rank, depth): ties go to the node found first
    waiting: list[tuple[float, int, int, int, int, int]] = []
    number = 0

    def offer(model: int, parent: int, rank: int, depth: int) -> None:
        nonlocal number
        known = rates[model]
        if depth >= max_depth or rank >= min(num_children(depth), len(known)):
            return
        above = shapes[model].reach[parent] if parent >= 0 else 1.0
        heapq.heappush(waiting, (-above * known[rank], number, model, parent, rank, depth))
        number += 1

    for model in range(len(rates)):
        offer(model, -1, 0, 0)
    while waiting and budget > 0:
        score, _, model, parent, rank, depth = heapq.heappop(waiting)
        if -score < min_reach:
            break
        shape, budget = shapes[model], budget - 1
        node = len(shape)
        shape.parents.append(parent)
        shape.ranks.append(rank)
        shape.depths.append(depth)
        shape.reach.append(-score)
        offer(model, node, 0, depth + 1)
        offer(model, parent, rank + 1, depth)
    return [_by_level(shape) for shape in shapes]


def _by_level(shape: Shape) -> Shape:
    """The same tree with nodes level by level, siblings together."""
    depths, parents = shape.depths, shape.parents
    place = [-1] * (len(shape) + 1)  # the last entry is the root's
    order: list[int] = []
    for depth in range(max(depths, default=-1) + 1):
        level = [node for node in range(len(shape)) if depths[node] == depth]
        level.sort(key=lambda node: (place[parents[node]], shape.ranks[node]))
        for node in level:
            place[node] = len(order)
            order.append(node)
    return Shape(
        [place[parents[node]] for node in order],
        [shape.ranks[node] for node in order],
        [depths[node] for node in order],
        [shape.reach[node] for node in order],
    )
