# SPDX-License-Identifier: Apache-2.0
"""Multi-step speculative sampling over a tree of *sampled* draft tokens (SpecInfer).

Miao et al. 2024, algorithm 2 (VerifyStochastic). At a node with target law P, its children's draws
are tried in the order they were drawn: a draw x from q is accepted with probability
``min(1, P(x) / q(x))``; if it is not, P becomes ``norm(max(0, P - q))`` and the next draw is tried;
after the last one the step's token is drawn from what is left of P. A leaf draws from P.

Exact iff every draw really came from its q, given the earlier draws under the same parent:

* ``iid``: drawn independently, each from its own q (one model, or several); q is used as it
  stands, so rows that are already the law given the earlier draws are right here too;
* ``without_replacement``: drawn one after the other, earlier siblings' tokens removed from q and q
  renormalised. That is done here, so q may be given before or after the removal;
* ``one_hot``: chosen, not drawn (top-k children, n-gram matches): q is one-hot.

Chosen children with their model's q are a biased combination (total variation 0.3 on small
examples) and are refused as far as numbers can tell: a one-hot tree with another q, a draw that its
q cannot yield, a repeated token where nothing repeats. The order of draws and the cut of a tree
must not depend on which tokens were drawn either; no function can see that.

Draws and nodes differ when two drafters propose the same token under one parent: it is verified
once, but keeps both draws and both q (:func:`merge_duplicates`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.scorers.tree import HostArray, Walk, host, node_depths

Drawn = Literal["iid", "without_replacement", "one_hot"]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

IID, WITHOUT_REPLACEMENT, ONE_HOT = 0, 1, 2
KINDS: dict[str, int] = {
    "iid": IID,
    "without_replacement": WITHOUT_REPLACEMENT,
    "one_hot": ONE_HOT,
}

# A row of probabilities made in float32 or bfloat16 sums to 1 within this.
SUM_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Uniforms:
    """The randomness of one step, drawn before it so that every request can have its own seed."""

    draws: NDArray[np.float64]  # [num_draws] in [0, 1), one for each acceptance test
    final: NDArray[np.float64]  # [num_requests] in [0, 1), for the token that ends the step


def draw_uniforms(
    draw_starts: HostArray,
    generator: torch.Generator | None = None,
    generators: Mapping[int, torch.Generator] | None = None,
) -> Uniforms:
    """Uniform numbers for :func:`multi_step`.

    Args:
        draw_starts: [num_requests + 1] first draw of each request.
        generator: For requests without a seed; None is torch's default one.
        generators: Request index -> generator, for requests with a seed (as in vLLM's
            ``SamplingMetadata.generators``); they alone decide that request's numbers.
    """
    first = host(draw_starts, np.int64)
    num_requests = len(first) - 1
    draws = torch.rand(int(first[-1]), dtype=torch.float64, generator=generator)
    final = torch.rand(num_requests, dtype=torch.float64, generator=generator)
    for request, own in (generators or {}).items():
        size = int(first[request + 1] - first[request])
        numbers = torch.rand(size + 1, dtype=torch.float64, generator=own)
        draws[first[request] : first[request + 1]] = numbers[:size]
        final[request] = numbers[size]
    return Uniforms(draws.numpy(), final.numpy())


def merge_duplicates(
    parents: HostArray,  # [num_nodes] parent within the request, -1 = root
    tokens: HostArray,  # [num_nodes]
) -> tuple[IntArray, IntArray, IntArray]:
    """Merge siblings of one request that have the same token; none of the draws is lost.

    Returns:
        ``(parents, tokens, draw_nodes)`` of the merged tree, its nodes in order of first
        appearance, and for each given node (each of them one draw) the node that it became.
    """
    index: dict[tuple[int, int], int] = {}
    draw_nodes: list[int] = []
    for parent, token in zip(host(parents, np.int64), host(tokens, np.int64), strict=True):
        key = (draw_nodes[parent] if parent >= 0 else -1, int(token))
        draw_nodes.append(index.setdefault(key, len(index)))
    merged = list(index)
    return (
        np.array([parent for parent, _ in merged], np.int64),
        np.array([token for _, token in merged], np.int64),
        np.array(draw_nodes, np.int64),
    )


# reassoc: without it one running sum would wait for itself at every step.
@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _total(row):  # type: ignore[no-untyped-def]
    total = 0.0
    for x in range(row.shape[0]):
        total += row[x]
    return total


@njit(nogil=True, cache=True)
def _subtract(residual, law):  # type: ignore[no-untyped-def]
    """residual := norm(max(0, residual - law)); as it was if nothing is left."""
    left = 0.0
    for x in range(residual.shape[0]):
        left += max(0.0, residual[x] - law[x])
    # A rejection needs P(x) < q(x), so P > q somewhere else: only rounding leaves nothing.
    if left > 0.0:
        for x in range(residual.shape[0]):
            residual[x] = max(0.0, residual[x] - law[x]) / left


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def _try_draws(  # type: ignore[no-untyped-def]  # noqa: PLR0917 (numba: positional)
    target, q, parents, tokens, draw_nodes, draws, node, kind, residual, law, tried
):
    """Try the draws below one node; all arrays are one request's.

    Returns:
        The accepted child or -1, how many draws were rejected (``residual`` is filled if any was),
        and the draw whose q is no law, or -1.
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
            law[:] = 0.0
            law[token] = 1.0
        else:
            law[:] = q[d]
            if kind == WITHOUT_REPLACEMENT:
                for t in range(num_tried):
                    law[tried[t]] = 0.0
            law /= mass
        _subtract(residual, law)
        tried[num_tried] = token
        num_tried += 1
    return -1, num_tried, -1


@njit(nogil=True, cache=True)
def _verify(  # type: ignore[no-untyped-def]  # noqa: PLR0917 (numba: positional)
    p, q, parents, tokens, starts, draw_nodes, draw_starts, draws, final, kind, width
):
    """Returns the walk's arrays and the first row that is no law: draw + 1, -1 - row of p, or 0."""
    num_requests = starts.shape[0] - 1
    accepted = np.full((num_requests, width), -1, np.int64)
    emitted = np.full((num_requests, width + 1), -1, np.int64)
    num_accepted = np.zeros(num_requests, np.int64)
    residual = np.empty(p.shape[1], np.float64)
    law = np.empty(p.shape[1], np.float64)
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
                law,
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


def _check(
    drawn: Drawn,
    probabilities: FloatArray | None,
    *,
    parents: IntArray,
    tokens: IntArray,
    requests: IntArray,
    draw_index: IntArray,
) -> None:
    """Refuse what no drafter can have drawn; arrays by draw but ``parents``/``tokens`` by node."""
    if drawn not in KINDS:
        raise SpecExtError(f"drawn: found {drawn!r}, expected one of {', '.join(KINDS)}")
    if probabilities is None:
        if drawn != "one_hot":
            raise SpecExtError(
                f"drawn={drawn!r} needs q, the law each token was drawn from; found none. Tokens "
                "that were chosen, not drawn, are 'one_hot'"
            )
    else:
        own = probabilities[np.arange(len(draw_index)), tokens[draw_index]]
        if drawn == "one_hot" and not (np.abs(own - 1.0) <= 1e-3).all():
            raise SpecExtError(
                "drawn='one_hot' with a q that is not one-hot: accepting chosen tokens with their "
                "model's probabilities is biased. Give no q, or draw the tokens from it"
            )
        if not (own > 0).all():
            raise SpecExtError(
                f"{int((~(own > 0)).sum())} of {len(own)} draft tokens have probability 0 in the q "
                "they are said to be drawn from; give the q of the draw itself (after its "
                "temperature and filters)"
            )
    if drawn != "iid":
        nodes = np.stack([requests, parents[draw_index], tokens[draw_index]])
        if np.unique(nodes, axis=1).shape[1] != nodes.shape[1]:
            raise SpecExtError(
                f"a token repeats among siblings, which drawn={drawn!r} cannot yield; several "
                "drafters under one parent are 'iid' with each draw's own q"
            )


def multi_step(
    p: HostArray,  # [num_nodes + num_requests, vocab] float32 target law, rows as in `.tree`
    parents: HostArray,  # [num_nodes] parent within the request, -1 = root; parents come first
    tokens: HostArray,  # [num_nodes] draft token ids
    starts: HostArray,  # [num_requests + 1] first node of each request
    q: HostArray | None,  # [num_draws, vocab] float32 law of each draw; None = one-hot
    *,
    uniforms: Uniforms,
    drawn: Drawn,
    draw_nodes: HostArray | None = None,  # [num_draws] node within the request; None: draw = node
    draw_starts: HostArray | None = None,  # [num_requests + 1] first draw of each request
) -> Walk:
    """Verify sampled trees; the emitted tokens follow ``p`` exactly.

    ``p`` is the target's law after temperature, top-k, top-p and eta (one-hot for greedy requests,
    which makes the rule the greedy walk). Draws of siblings stand in the order they were drawn.
    The loop runs on the host: rows of an accelerator are copied first. approximation: laws are
    float32, so frequencies are exact to about 1e-7.

    Returns:
        Accepted nodes and emitted tokens, as :func:`.tree.walk_samples`.

    Raises:
        SpecExtError: A biased or impossible combination of ``drawn`` and ``q``, or a row that is
            not a probability distribution.
    """
    node_starts = host(starts, np.int64)
    node_parents, node_tokens = host(parents, np.int64), host(tokens, np.int64)
    if draw_nodes is None:
        draw_starts = node_starts
        sizes = np.diff(node_starts)
        draw_nodes = np.arange(node_starts[-1]) - np.repeat(node_starts[:-1], sizes)
    if draw_starts is None:
        raise SpecExtError("draw_nodes without draw_starts; give the first draw of each request")
    by_draw, first_draw = host(draw_nodes, np.int64), host(draw_starts, np.int64)
    requests = np.repeat(np.arange(len(node_starts) - 1), np.diff(first_draw))
    probabilities = None if q is None else host(q, np.float32)
    target = host(p, np.float32)
    rows = node_starts[-1] + len(node_starts) - 1
    if len(target) != rows or (probabilities is not None and len(probabilities) != len(by_draw)):
        raise SpecExtError(
            f"found {len(target)} target rows and {0 if q is None else len(q)} draft laws; "
            f"expected {rows} (one a node and one a request) and {len(by_draw)} (one a draw)"
        )
    _check(
        drawn,
        probabilities,
        parents=node_parents,
        tokens=node_tokens,
        requests=requests,
        draw_index=node_starts[requests] + by_draw,
    )
    depths = node_depths(node_parents, node_starts)
    *arrays, bad = _verify(
        target,
        np.empty((0, target.shape[1]), np.float32) if probabilities is None else probabilities,
        node_parents,
        node_tokens,
        node_starts,
        by_draw,
        first_draw,
        uniforms.draws,
        uniforms.final,
        KINDS[drawn],
        int(depths.max(initial=-1)) + 1,
    )
    if bad:
        law, values = (
            (f"draft law {bad - 1}", probabilities[bad - 1])
            if bad > 0 and probabilities is not None
            else (f"target row {-1 - bad}", target[-1 - bad])
        )
        raise SpecExtError(
            f"{law}: found a sum of {float(values.sum()):.4g}, expected probabilities that sum "
            "to 1; give the softmax, not logits"
        )
    return Walk(*arrays)
