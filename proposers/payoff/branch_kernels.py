# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of :mod:`.branches`."""

import numpy as np

from vllm_spec_ext.compiled import kernel


@kernel
def keep_paying(parents, gains, branch_cost, keeps):  # type: ignore[no-untyped-def]
    """Write which nodes belong to the part of a tree that earns most.

    What a node earns with all that is worth keeping below it is known once its children are, and
    these stand behind it. Of the children one goes on with the path, and the others are branches.

    Args:
        parents: [n] int32, before their children; -1 = the root.
        gains: [n] tokens that each node earns, its verification taken off.
        branch_cost: Tokens that each branch costs beside its nodes.
        keeps: [n] bool, written.
    """
    count = len(parents)
    # Of each node, the root last: what the child earns that goes on with its path, which one that
    # is, and what the children earn as branches.
    first = np.zeros(count + 1)
    first_child = np.full(count + 1, -1)
    branches = np.zeros(count + 1)
    earned = np.empty(count)
    for node in range(count - 1, -1, -1):
        own = first[node] + branches[node] - max(0.0, first[node] - branch_cost)
        earned[node] = gains[node] + own
        above = parents[node] if parents[node] >= 0 else count
        if earned[node] >= 0.0:
            branches[above] += max(0.0, earned[node] - branch_cost)
            if earned[node] >= first[above]:  # of equals the one that comes first
                first[above], first_child[above] = earned[node], node
    for node in range(count):
        parent = parents[node]
        above = parent if parent >= 0 else count
        goes_on = first_child[above] == node or earned[node] > branch_cost
        keeps[node] = earned[node] >= 0.0 and goes_on and (parent < 0 or keeps[parent])
