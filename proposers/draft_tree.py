# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of draft trees: depths, paths, what is a chain and what is no tree at all.

A tree of n nodes is a sequence of n parents: -1 is the root (the last verified token), and a
parent stands before its children. Drafts are small, so plain Python is faster than numpy here.

Two places do some of it again, inside compiled loops that plain Python would leave: the walk of the
scorers over a whole batch (:mod:`vllm_spec_ext.scorers.walk.tree`), and the searches that build a
tree node by node (``adaptive_ngram/tree_order.py``, ``blockwise/tree.py``).
"""

from collections.abc import Sequence

from vllm_spec_ext.proposers.records import Draft


def chain_parents(num_nodes: int) -> list[int]:
    """Parents of a chain: each node hangs below the one before it."""
    return list(range(-1, num_nodes - 1))


def parents_of(draft: Draft) -> list[int]:
    """Parents of a draft's nodes; a draft that names none is a chain."""
    return chain_parents(len(draft)) if draft.parents is None else draft.parents.tolist()


def is_branching(parents: Sequence[int]) -> bool:
    """Whether these nodes are anything but one chain."""
    return [*parents] != chain_parents(len(parents))


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, 0 for children of the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def tree_problem(parents: Sequence[int], num_nodes: int) -> str | None:
    """What keeps these parents from being a tree of that many nodes; None if they are one."""
    if len(parents) != num_nodes:
        return f"found {len(parents)} parents, expected one for each of {num_nodes} nodes"
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            return f"node {node}: found parent {parent}, expected -1 to {node - 1}"
    return None


def is_path(nodes: Sequence[int], parents: Sequence[int]) -> bool:
    """Whether these nodes lead down from the root, each the child of the one before it."""
    above = -1
    for node in nodes:
        if not 0 <= node < len(parents) or parents[node] != above:
            return False
        above = node
    return True


def agreeing_path(
    tokens: Sequence[int], parents: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...]:
    """Nodes of the longest path from the root whose tokens are the first ones of ``wanted``."""
    nodes: list[int] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        # Parents come first, so one pass suffices: siblings of a node on the path are skipped.
        above = nodes[-1] if nodes else -1
        if parent == above and len(nodes) < len(wanted) and token == wanted[len(nodes)]:
            nodes.append(node)
    return tuple(nodes)
