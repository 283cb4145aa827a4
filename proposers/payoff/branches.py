# SPDX-License-Identifier: Apache-2.0
"""Which branches of a draft tree earn what a branch costs beside its nodes.

A branch is a path that leaves another one. Verifying it takes a virtual request of its own: a copy
of the partly filled block, and the prefix read once more. Where that costs half as much as a draft
token, most trees are better off as chains; where it is nearly free, as on GPUs, hardly any.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import Draft, IntArray
from vllm_spec_ext.proposers.draft_tree import is_branching
from vllm_spec_ext.proposers.records import StepContext


def paying_nodes(
    parents: IntArray, gains: NDArray[np.floating], branch_cost: float
) -> IntArray | None:
    """The part of a tree that earns most.

    Args:
        parents: [n], before their children; -1 = the root.
        gains: [n] tokens that each node earns: the probability that it is accepted, less the
            tokens that verifying it costs.
        branch_cost: Tokens that each branch costs beside its nodes; the first path is none.

    Returns:
        [m] its nodes, in their order, of which each follows its parent; None if that is all.
    """
    if branch_cost <= 0.0 or not len(parents):
        return None
    # Here, because importing numba is slow.
    from vllm_spec_ext.proposers.payoff.branch_kernels import keep_paying

    keeps = np.empty(len(parents), np.bool_)
    keep_paying(parents, gains, branch_cost, keeps)
    return None if keeps.all() else np.flatnonzero(keeps).astype(np.int32)


def parents_among(parents: IntArray, nodes: IntArray) -> IntArray:
    """[m] parents of the nodes that stay, counted among them.

    Args:
        parents: [n] of all nodes.
        nodes: [m] those that stay, in their order, and each one's parent among them.
    """
    places = np.full(len(parents) + 1, -1, np.int32)  # the last entry is the root's
    places[nodes] = np.arange(len(nodes), dtype=np.int32)
    found: IntArray = places[parents[nodes]]
    return found


def without_dear_branches(
    draft: Draft,
    step: StepContext,
    acceptance: Callable[[NDArray[np.float32]], NDArray[np.float64]],
) -> Draft:
    """A draft whose nodes all pay, less the branches that do not earn what a branch costs.

    Args:
        draft: With the probability of each path, as promised.
        step: Its costs.
        acceptance: [n] what such promises have turned out to be worth.
    """
    cost = step.branch_cost or 0.0
    if draft.parents is None or draft.path_probs is None or cost <= 0.0:
        return draft
    gains = np.maximum(acceptance(draft.path_probs) - (step.min_probability or 0.0), 0.0)
    kept = paying_nodes(draft.parents, gains, cost)
    if kept is None:
        return draft
    parents = parents_among(draft.parents, kept)
    return Draft(
        draft.tokens[kept],
        parents if is_branching(parents.tolist()) else None,
        path_probs=draft.path_probs[kept],
    )


def warm_up() -> None:
    """Compile now, not in a user's first request."""
    for kind in (np.float32, np.float64):
        paying_nodes(np.full(1, -1, np.int32), np.ones(1, kind), 0.1)
