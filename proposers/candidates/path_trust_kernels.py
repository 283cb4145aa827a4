# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of :mod:`.path_trust`; a module of its own for the reason of :mod:`.kernels`."""

import numpy as np

from vllm_spec_ext.compiled import kernel
from vllm_spec_ext.proposers.candidates.path_trust import BOUNDS, DEPTHS
from vllm_spec_ext.proposers.payoff.branch_kernels import keep_paying

_BOUNDS = np.array(BOUNDS)
_DEPTHS = np.array(DEPTHS)
_LARGEST = 7.0  # log-odds
_MOST = 4.0  # log-odds by which a class is corrected


@kernel
def _log_odds(parents, paths, node):  # type: ignore[no-untyped-def]
    """Of a node behind its parent, as the sources say."""
    above = paths[parents[node]] if parents[node] >= 0 else 1.0
    found = paths[node] / above if above > 0.0 else 0.0
    if found <= 0.0:
        return -_LARGEST
    if found >= 1.0:
        return _LARGEST
    return min(_LARGEST, max(-_LARGEST, np.log(found / (1.0 - found))))


@kernel
def _correct(parents, paths, corrections, bias, corrected):  # type: ignore[no-untyped-def]
    """Write what the paths have turned out to be worth.

    Args:
        parents: [n], before their children.
        paths: [n] path probabilities, as the sources say.
        corrections: [depths, classes of log-odds] what is added to log-odds.
        bias: [2] the same of the request: to first tokens, to further ones.
        corrected: [n], written.
    """
    depths = np.empty(len(parents), np.int32)
    for node in range(len(parents)):
        parent = parents[node]
        depths[node] = 1 if parent < 0 else depths[parent] + 1
        log_odds = _log_odds(parents, paths, node)
        row = np.searchsorted(_DEPTHS, depths[node])
        own = 0 if parent < 0 else 1
        log_odds += corrections[row, np.searchsorted(_BOUNDS, log_odds)] + bias[own]
        above = corrected[parent] if parent >= 0 else 1.0
        corrected[node] = above / (1.0 + np.exp(-log_odds))


@kernel
def best_part(  # type: ignore[no-untyped-def]
    parents, tokens, said, evidence, corrections, bias, node_cost, branch_cost
):
    """The nodes by what they have turned out to be worth, without branches that do not pay.

    Args:
        parents: [n], before their children.
        tokens: [n]
        said: [n] path probabilities, as the sources say.
        evidence: [n, columns] classes.
        corrections, bias: As of :func:`_correct`.
        node_cost: Tokens that verifying a node costs.
        branch_cost: Tokens that each branch costs beside its nodes.

    Returns:
        Parents, tokens, path probabilities, classes, and what the sources said, likeliest first.
    """
    size = len(parents)
    trusted = np.empty(size, np.float32)
    _correct(parents, said, corrections, bias, trusted)
    # A path is never likelier than its beginning, so parents stay before their children: equals
    # keep their order.
    order, places = np.empty(size, np.int32), np.empty(size, np.int32)
    for node in range(size):
        place = node
        while place > 0 and trusted[order[place - 1]] < trusted[node]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = node
    for place in range(size):
        places[order[place]] = place
    above, paths = np.empty(size, np.int32), trusted[order]
    for place in range(size):
        parent = parents[order[place]]
        above[place] = places[parent] if parent >= 0 else -1
    if branch_cost > 0.0:
        keeps = np.empty(size, np.bool_)
        # What costs more than it gives is left out by `.node_choice`, or drafted as a trial.
        gains = np.maximum(paths - np.float32(node_cost), np.float32(0.0))
        keep_paying(above, gains, branch_cost, keeps)
        num_kept = 0
        for place in range(size):
            if keeps[place]:
                order[num_kept], paths[num_kept] = order[place], paths[place]
                above[num_kept] = places[above[place]] if above[place] >= 0 else -1
                places[place] = num_kept
                num_kept += 1
        order, paths, above = order[:num_kept], paths[:num_kept], above[:num_kept]
    return above, tokens[order], paths, evidence[order], said[order]


@kernel
def learn(  # type: ignore[no-untyped-def]
    parents, paths, num_drafted, accepted, corrections, squares, bias, rates
):
    """Move the corrections towards what the target made of a draft.

    A node tells something if its parent was accepted.

    Args:
        parents: [n] of the draft.
        paths: [n] path probabilities, as the sources say.
        num_drafted: Nodes that were verified, the first ones.
        accepted: [n] whether each node was.
        corrections, squares: [depths, classes] log-odds, and sums of squared errors.
        bias: [2] of the request.
        rates: [4] of learning for all requests; what remains of the sums of squares for one more
            node; of learning for this request; what remains of its bias.
    """
    depths = np.empty(len(parents), np.int32)
    for node in range(num_drafted):
        parent = parents[node]
        depths[node] = 1 if parent < 0 else depths[parent] + 1
        if parent >= 0 and not accepted[parent]:
            continue
        log_odds = _log_odds(parents, paths, node)
        row, place = np.searchsorted(_DEPTHS, depths[node]), np.searchsorted(_BOUNDS, log_odds)
        own = 0 if parent < 0 else 1
        log_odds += corrections[row, place] + bias[own]
        error = 1.0 / (1.0 + np.exp(-log_odds)) - (1.0 if accepted[node] else 0.0)
        # With the error itself among the squares no step is longer than the rate, however small
        # the errors were before; and what lasts is found out, however long it was otherwise.
        squares[row, place] = rates[1] * squares[row, place] + error * error
        moved = corrections[row, place] - rates[0] * error / np.sqrt(squares[row, place])
        corrections[row, place] = min(max(moved, -_MOST), _MOST)
        bias[own] = rates[3] * bias[own] - rates[2] * error
