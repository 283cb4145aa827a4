# SPDX-License-Identifier: Apache-2.0
"""Compiled core of :mod:`.multi_step`: acceptance tests and residual distributions, in float64.

Only rows on the accepted path are read, and a residual is only made at a rejection.
"""

import numpy as np

from vllm_spec_ext.compiled import kernel

IID, WITHOUT_REPLACEMENT, ONE_HOT = 0, 1, 2

# A row of probabilities made in float32 or bfloat16 sums to 1 within this.
SUM_TOLERANCE = 2e-2


# reassoc: without it one running sum would wait for itself at every step.
@kernel(fastmath={"reassoc"})
def _total(row):  # type: ignore[no-untyped-def]
    total = 0.0
    for x in range(row.shape[0]):
        total += row[x]
    return total


@kernel
def _subtract(residual, distribution):  # type: ignore[no-untyped-def]
    """residual := norm(max(0, residual - distribution)); as it was if nothing is left."""
    left = 0.0
    for x in range(residual.shape[0]):
        left += max(0.0, residual[x] - distribution[x])
    # A rejection needs P(x) < q(x), so P > q somewhere else: only rounding leaves nothing.
    if left > 0.0:
        for x in range(residual.shape[0]):
            residual[x] = max(0.0, residual[x] - distribution[x]) / left


@kernel
def _invert(weights, uniform):  # type: ignore[no-untyped-def]
    """The token at which the running sum passes ``uniform`` times the whole."""
    threshold = uniform * _total(weights)
    reached = 0.0
    last = 0
    for x in range(weights.shape[0]):
        if weights[x] > 0.0:
            reached += weights[x]
            last = x
            if reached > threshold:
                break
    return last


@kernel
def _try_draws(  # type: ignore[no-untyped-def]
    target, q, parents, tokens, draw_nodes, draws, node, kind, residual, distribution, tried
):
    """Try the draws below one node; all arrays are one request's.

    Returns:
        The accepted child or -1, how many draws were rejected (``residual`` is filled if any was),
        and the draw whose q is no distribution, or -1.
    """
    num_tried = 0
    target_mass = _total(target)
    for d in range(draw_nodes.shape[0]):
        child = draw_nodes[d]
        if parents[child] != node:
            continue
        token = tokens[child]
        mass = chance = 1.0
        if kind != ONE_HOT:
            mass = _total(q[d])
            if not abs(mass - 1.0) <= SUM_TOLERANCE:
                return -1, num_tried, d
            if kind == WITHOUT_REPLACEMENT:
                for t in range(num_tried):
                    mass -= q[d, tried[t]]
            mass = max(mass, q[d, token])
            chance = q[d, token] / mass
        left = residual[token] if num_tried > 0 else target[token] / target_mass
        if draws[d] * chance < left:
            return child, num_tried, -1
        if num_tried == 0:
            residual[:] = target
            residual /= target_mass
        if kind == ONE_HOT:
            distribution[:] = 0.0
            distribution[token] = 1.0
        else:
            distribution[:] = q[d]
            if kind == WITHOUT_REPLACEMENT:
                for t in range(num_tried):
                    distribution[tried[t]] = 0.0
            distribution /= mass
        _subtract(residual, distribution)
        tried[num_tried] = token
        num_tried += 1
    return -1, num_tried, -1


@kernel
def verify(  # type: ignore[no-untyped-def]
    p, q, parents, tokens, starts, draw_nodes, draw_starts, draws, final, kind, width
):
    """The arrays of a walk, and the first row whose sum is wrong: draw + 1, -1 - row of p, or 0."""
    num_requests = starts.shape[0] - 1
    accepted = np.full((num_requests, width), -1, np.int64)
    emitted = np.full((num_requests, width + 1), -1, np.int64)
    num_accepted = np.zeros(num_requests, np.int64)
    residual = np.empty(p.shape[1], np.float64)
    distribution = np.empty(p.shape[1], np.float64)
    tried = np.empty(draw_nodes.shape[0], np.int64)
    for r in range(num_requests):
        nodes = slice(starts[r], starts[r + 1])
        own = slice(draw_starts[r], draw_starts[r + 1])
        own_q = q[own] if kind != ONE_HOT else q
        node = -1
        while True:
            target = p[starts[r] + r + 1 + node]
            if not abs(_total(target) - 1.0) <= SUM_TOLERANCE:
                return accepted, emitted, num_accepted, -1 - (starts[r] + r + 1 + node)
            child, num_tried, bad = _try_draws(
                target,
                own_q,
                parents[nodes],
                tokens[nodes],
                draw_nodes[own],
                draws[own],
                node,
                kind,
                residual,
                distribution,
                tried,
            )
            if bad >= 0:
                return accepted, emitted, num_accepted, draw_starts[r] + bad + 1
            length = num_accepted[r]
            if child < 0:
                if num_tried > 0:
                    emitted[r, length] = _invert(residual, final[r])
                else:
                    emitted[r, length] = _invert(target, final[r])
                break
            accepted[r, length] = child
            emitted[r, length] = tokens[starts[r] + child]
            num_accepted[r] = length + 1
            node = child
    return accepted, emitted, num_accepted, 0
