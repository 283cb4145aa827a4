# SPDX-License-Identifier: Apache-2.0
"""Growing trees level by level: one forward pass of a model for all requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.proposers.growth.drawing import distributions, draw
from vllm_spec_ext.proposers.growth.grown_tree import GrownTree, Wish
from vllm_spec_ext.proposers.models import Branch, DraftModel
from vllm_spec_ext.proposers.records import RequestStep
from vllm_spec_ext.top_columns import top_log_probs


@dataclass(frozen=True)
class Reach:
    """How far trees may grow."""

    max_depth: int  # levels
    candidates: Callable[[int], int]  # children of a chosen node, by their depth
    max_branches: int  # nodes of a level and request that are read, at most


@dataclass(eq=False)
class _Leaf:
    """A node that a model has read, so its children can be found; -1 = the root."""

    tree: GrownTree
    node: int
    branch: Branch
    children: list[int]


Choose = Callable[[list[tuple[GrownTree, int]]], list[int]]
"""Which of these nodes the next forward pass is to read, as indices in rising order."""


@dataclass(frozen=True)
class Growth:
    """What growing trees gave."""

    trees: list[GrownTree]
    pass_sizes: list[
        int
    ]  # branches of each pass after the first, which brings the model up to date


def grow(
    model: DraftModel,
    requests: Sequence[RequestStep],
    wishes: Sequence[Wish],
    reach: Reach,
    numbers: Callable[[RequestStep, int], NDArray[np.float64]],
    choose: Choose,
) -> Growth:
    """Draft with one model for these requests.

    Args:
        model: Reads and predicts.
        requests: Of the step.
        wishes: What to draft for which of them.
        reach: How far.
        numbers: The uniform numbers of a request's draws, so many.
        choose: Which nodes are worth a forward pass; for a drawn tree it may not depend on tokens.

    Returns:
        One tree for each wish; empty where the model cannot follow a request.
    """
    trees = [GrownTree(wish) for wish in wishes]
    trunks = model.sync(requests, [wish.request for wish in wishes])
    leaves = [
        _Leaf(tree, -1, trunk, [])
        for tree, trunk in zip(trees, trunks, strict=True)
        if trunk is not None and trunk.alive
    ]
    noise = {
        wish.request: numbers(requests[wish.request], len(wish.shape))
        for wish in wishes
        if wish.shape is not None
    }
    sizes = []
    for depth in range(reach.max_depth):
        if not leaves:
            break
        for leaf in leaves:
            leaf.tree.read.add(leaf.node)
        logits = model.logits([leaf.branch for leaf in leaves])
        _choose_children(leaves, logits, requests, reach.candidates(depth))
        for leaf in leaves:
            if leaf.tree.wish.shape is not None:
                leaf.children = leaf.tree.reserve(leaf.node)
        # Which nodes go on, and which of these find room, is settled before a token is drawn.
        found = _next_branches(model, leaves, depth, reach, choose)
        _draw_children(leaves, logits, requests, noise)
        if not found:
            break
        leaves = _read(model, found)
        sizes.append(len(found))
    return Growth(trees, sizes)


def _choose_children(
    leaves: Sequence[_Leaf], logits: torch.Tensor, requests: Sequence[RequestStep], count: int
) -> None:
    """Hang the best candidates below the nodes of chosen trees."""
    rows = [i for i, leaf in enumerate(leaves) if leaf.tree.wish.shape is None]
    if not rows:
        return
    logits = _rows(logits, rows)
    warm = [max(requests[leaves[row].tree.wish.request].temperature, 0.0) for row in rows]
    if any(warm):
        divisors = [temperature or 1.0 for temperature in warm]
        logits = logits / torch.tensor(divisors, device=logits.device)[:, None]
    log_probs, tokens = top_log_probs(logits, count)
    # Waits for the device: drafts are scheduled from host memory.
    on_host = zip(rows, tokens.tolist(), log_probs.tolist(), strict=True)
    for row, ids, probs in on_host:
        leaves[row].children = leaves[row].tree.choose(leaves[row].node, ids, probs)


def _draw_children(
    leaves: Sequence[_Leaf],
    logits: torch.Tensor,
    requests: Sequence[RequestStep],
    noise: dict[int, NDArray[np.float64]],
) -> None:
    """Draw tokens for the reserved places of drawn trees."""
    rows = [i for i, leaf in enumerate(leaves) if leaf.tree.wish.shape and leaf.children]
    if not rows:
        return
    asked = [requests[leaves[row].tree.wish.request] for row in rows]
    probs = distributions(
        _rows(logits, rows),
        [request.temperature for request in asked],
        [request.top_k for request in asked],
        [request.top_p for request in asked],
    )
    widest = max(len(leaves[row].children) for row in rows)
    numbers = np.zeros((len(rows), widest))
    for i, row in enumerate(rows):
        leaf = leaves[row]
        own = noise[leaf.tree.wish.request]
        for k, child in enumerate(leaf.children):
            numbers[i, k] = own[leaf.tree.places[child]]
    tokens = draw(probs, numbers)
    for i, row in enumerate(rows):
        tree = leaves[row].tree
        for k, child in enumerate(leaves[row].children):
            tree.tokens[child] = int(tokens[i, k])
            tree.rows.append(probs[i])


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]


def _next_branches(
    model: DraftModel, leaves: Sequence[_Leaf], depth: int, reach: Reach, choose: Choose
) -> list[tuple[GrownTree, int, Branch]]:
    """Nodes of the new level that are to be read, each with a branch that ends at its parent."""
    if depth + 1 >= reach.max_depth:
        return []
    wanted = _worth_reading(leaves, reach.max_branches)
    wanted = [wanted[i] for i in choose([(leaf.tree, node) for leaf, node in wanted])]
    branches: list[Branch | None] = []
    forked: list[int] = []
    taken: set[int] = set()
    for i, (leaf, _) in enumerate(wanted):
        # The first child goes on with its parent's branch, the others with a fork of it.
        if id(leaf) in taken:
            forked.append(i)
        taken.add(id(leaf))
        branches.append(leaf.branch)
    if forked:
        forks = model.fork([wanted[i][0].branch for i in forked])
        for i, fork in zip(forked, forks, strict=True):
            branches[i] = fork
    return [
        (leaf.tree, node, branch)
        for (leaf, node), branch in zip(wanted, branches, strict=True)
        if branch is not None
    ]


def _worth_reading(leaves: Sequence[_Leaf], max_branches: int) -> list[tuple[_Leaf, int]]:
    """New nodes that may have children in the draft, leaf by leaf."""
    found: list[tuple[_Leaf, int]] = []
    kept: dict[int, set[int]] = {}
    for leaf in leaves:
        tree = leaf.tree
        if tree.wish.shape is not None:
            shape = tree.wish.shape
            found += [(leaf, node) for node in leaf.children if shape.children(tree.places[node])]
            continue
        if id(tree) not in kept:
            level = [n for n in _with_room_below(tree) if tree.depths[n] == tree.depths[-1]]
            level.sort(key=lambda node: -tree.log_probs[node])
            kept[id(tree)] = set(level[:max_branches])
        found += [(leaf, node) for node in leaf.children if node in kept[id(tree)]]
    return found


def _with_room_below(tree: GrownTree) -> list[int]:
    """Nodes whose children can be among the best: a child is never likelier than its parent."""
    best = tree.best()
    if len(best) < tree.wish.room:
        return best
    least = min(tree.log_probs[node] for node in best)
    return [node for node in best if tree.log_probs[node] > least]


def _read(model: DraftModel, found: Sequence[tuple[GrownTree, int, Branch]]) -> list[_Leaf]:
    """One forward pass over the tokens of these nodes; those that found room are the leaves."""
    branches = [branch for _, _, branch in found]
    model.extend(branches, [[tree.tokens[node]] for tree, node, _ in found])
    return [_Leaf(tree, node, branch, []) for tree, node, branch in found if branch.alive]
