# SPDX-License-Identifier: Apache-2.0
"""Trees of several models in one draft (the merged trees of SpecInfer, definition 3.2).

Chosen trees become a trie: the same path is verified once, and credited to all its models. Drawn
trees are put side by side: a token that two models drew stays two draws, each with its own
distribution, as multi-step speculative sampling demands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_spec_ext.proposers.draft_tree import is_branching
from vllm_spec_ext.proposers.growth.grown_tree import GrownTree
from vllm_spec_ext.proposers.records import Draft

if TYPE_CHECKING:
    import torch


@dataclass
class MergedTree:
    """Nodes of a draft in their order, with what is to be learned from them."""

    tokens: list[int]
    parents: list[int]
    probs: list[float]  # of the path to each node, as learned
    promises: list[dict[int, float]]
    """Of each node: model -> path probability by that model's own estimate."""
    barren: list[set[int]]
    """Of each node: models that read it, and found no child that is worth verifying."""
    ranks: list[int]  # drawn: place among the draws of the same model below the same node
    rows: "list[torch.Tensor] | None" = None  # drawn: [vocab] distribution of each node

    def __len__(self) -> int:
        return len(self.tokens)

    def draft(self, names: Sequence[str]) -> Draft:
        """As the engine takes it.

        Args:
            names: Of the models; with one of them nodes need no source.
        """
        import torch

        probs = None if self.rows is None else torch.stack(self.rows)
        sources = None
        if len(names) > 1:
            sources = tuple(tuple(names[m] for m in sorted(own)) for own in self.promises)
        return Draft(
            np.array(self.tokens, np.int32),
            np.array(self.parents, np.int32) if is_branching(self.parents) else None,
            probs,
            path_probs=np.array(self.probs, np.float32),
            sources=sources,
        )


def merge_chosen(trees: Sequence[tuple[int, GrownTree, Sequence[float]]], room: int) -> MergedTree:
    """The trie of several models' chosen trees, cut to its likeliest nodes.

    Args:
        trees: Number of the model, its tree, and the probability of each of its nodes as learned.
        room: Most nodes.

    Returns:
        Depth first, the likeliest path first.
    """
    index: dict[tuple[int, int], int] = {}
    parents: list[int] = []
    tokens: list[int] = []
    probs: list[float] = []
    promises: list[dict[int, float]] = []
    barren: list[set[int]] = []
    for model, tree, estimates in trees:
        place = {-1: -1}  # node of this tree -> node of the trie
        best = tree.best()
        fertile = {tree.parents[node] for node in best}
        for node in best:
            parent = place[tree.parents[node]]
            found = index.setdefault((parent, tree.tokens[node]), len(tokens))
            if found == len(tokens):
                parents.append(parent)
                tokens.append(tree.tokens[node])
                probs.append(0.0)
                promises.append({})
                barren.append(set())
            # Models that agree are no independent witnesses; a child is no likelier than its parent
            limit = probs[parent] if parent >= 0 else 1.0
            probs[found] = max(probs[found], min(limit, estimates[node]))
            promises[found][model] = float(np.exp(tree.log_probs[node]))
            if node in tree.read and node not in fertile:
                barren[found].add(model)
            place[node] = found
    return _depth_first(MergedTree(tokens, parents, probs, promises, barren, []), room)


def _depth_first(tree: MergedTree, room: int) -> MergedTree:
    """The likeliest nodes of a chosen tree in depth-first order, likeliest child first."""
    probs = tree.probs
    kept = sorted(range(len(tree)), key=lambda node: -probs[node])[:room]  # stable
    children: dict[int, list[int]] = {}
    for node in sorted(kept):
        children.setdefault(tree.parents[node], []).append(node)
    order: list[int] = []
    place: dict[int, int] = {-1: -1}
    stack = [-1]
    while stack:
        node = stack.pop()
        if node >= 0:
            place[node] = len(order)
            order.append(node)
        stack += sorted(children.get(node, ()), key=lambda child: -probs[child])[::-1]
    return MergedTree(
        [tree.tokens[node] for node in order],
        [place[tree.parents[node]] for node in order],
        [probs[node] for node in order],
        [tree.promises[node] for node in order],
        [tree.barren[node] for node in order],
        [0] * len(order),
    )


def join_drawn(trees: Sequence[tuple[int, GrownTree]]) -> MergedTree:
    """The union of several models' drawn trees.

    Siblings are tried in the order in which they stand, and the end of a draft may be cut off: so
    the order follows from the shapes alone.

    Args:
        trees: Number of the model and its tree, each within its share of the room.

    Returns:
        Model by model, depth first, in the order of the draws.
    """
    merged = MergedTree([], [], [], [], [], [], [])
    assert merged.rows is not None
    for model, tree in trees:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        place: dict[int, int] = {-1: -1}
        stack = children.get(-1, [])[::-1]
        while stack:
            node = stack.pop()
            place[node] = len(merged)
            merged.parents.append(place[tree.parents[node]])
            merged.tokens.append(tree.tokens[node])
            merged.probs.append(float(np.exp(tree.log_probs[node])))
            merged.promises.append({model: merged.probs[-1]})
            merged.barren.append(set())
            merged.ranks.append(tree.ranks[node])
            merged.rows.append(tree.rows[node])
            stack += children.get(node, [])[::-1]
    return merged
