# SPDX-License-Identifier: Apache-2.0
"""Multi-step speculative sampling over a tree of *sampled* draft tokens (SpecInfer).

Miao et al. 2024, algorithm 2 (VerifyStochastic). At a node whose target distribution is P, its
children's draws are tried in the order they were drawn: a draw x from q is accepted with chance
``min(1, P(x) / q(x))``, else P becomes ``norm(max(0, P - q))`` and the next draw is tried; after
the last one the step's token is drawn from what is left of P. A leaf draws from P.

Exact iff every draw really came from its q, given the earlier draws under the same parent:

* ``iid``: drawn independently, each from its own q (or from a q given the earlier draws);
* ``without_replacement``: drawn one after the other, earlier siblings' tokens removed from q. They
  are removed here, so q may be given before or after that;
* ``one_hot``: chosen, not drawn (top-k children, n-gram matches): q is one-hot.

Chosen children with their model's q are biased (total variation 0.3 on small examples), and refused
as far as numbers can tell: a one-hot tree with another q, a draw that its q cannot yield, a
repeated token where nothing repeats. The order of draws and the cut of a tree must not depend on
which tokens were drawn either; no function can see that.

A token that two drafters propose under one parent is verified once, with both draws and both q
(:func:`merge_duplicates`).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.scorers.walk.residual import IID, ONE_HOT, WITHOUT_REPLACEMENT, verify
from vllm_spec_ext.scorers.walk.tree import HostArray, Walk, host, node_depths

Drawn = Literal["iid", "without_replacement", "one_hot"]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

KINDS: dict[str, int] = {
    "iid": IID,
    "without_replacement": WITHOUT_REPLACEMENT,
    "one_hot": ONE_HOT,
}


@dataclass(frozen=True)
class Uniforms:
    """The randomness of one step, drawn before it so that every request can have its own seed."""

    draws: NDArray[np.float64]  # [num_draws] in [0, 1), one for each acceptance test
    final: NDArray[np.float64]  # [num_requests] in [0, 1), for the token that ends the step


def draw_uniforms(draw_starts: HostArray, generator: torch.Generator | None = None) -> Uniforms:
    """Uniform numbers for :func:`multi_step`.

    Args:
        draw_starts: [num_requests + 1] first draw of each request.
        generator: None is torch's default one.
    """
    first = host(draw_starts, np.int64)
    draws = torch.rand(int(first[-1]), dtype=torch.float64, generator=generator)
    final = torch.rand(len(first) - 1, dtype=torch.float64, generator=generator)
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
                f"drawn={drawn!r} needs q, the distribution each token was drawn from; found none. "
                "Tokens that were chosen, not drawn, are 'one_hot'"
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
    p: HostArray,  # [num_nodes + num_requests, vocab] float32 of the target, rows as in `.tree`
    parents: HostArray,  # [num_nodes] parent within the request, -1 = root; parents come first
    tokens: HostArray,  # [num_nodes] draft token ids
    starts: HostArray,  # [num_requests + 1] first node of each request
    q: HostArray | None,  # [num_draws, vocab] float32 distribution of each draw; None = one-hot
    *,
    uniforms: Uniforms,
    drawn: Drawn,
    draw_nodes: HostArray | None = None,  # [num_draws] node within the request; None: draw = node
    draw_starts: HostArray | None = None,  # [num_requests + 1] first draw of each request
) -> Walk:
    """Verify sampled trees; the emitted tokens follow ``p`` exactly.

    ``p`` is the target's distribution after temperature, top-k, top-p and eta (one-hot for greedy
    requests, which makes the rule the greedy walk). Draws of siblings stand in the order they were
    drawn. The loop runs on the host: rows of an accelerator are copied first. approximation: rows
    are float32, so frequencies are exact to about 1e-7.

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
            f"found {len(target)} target rows and {0 if q is None else len(q)} draft rows; "
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
    *arrays, bad = verify(
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
        distribution, values = (
            (f"draft distribution {bad - 1}", probabilities[bad - 1])
            if bad > 0 and probabilities is not None
            else (f"target row {-1 - bad}", target[-1 - bad])
        )
        raise SpecExtError(
            f"{distribution}: found a sum of {float(values.sum()):.4g}, expected probabilities "
            "that sum to 1; give the softmax, not logits"
        )
    return Walk(*arrays)


def warm_up() -> None:
    """Compile the rule (seconds on a cold cache) before the first request."""
    p, starts = np.full((2, 2), 0.5, np.float32), np.array([0, 1])
    uniforms = Uniforms(np.zeros(1), np.zeros(1))
    multi_step(p, np.array([-1]), np.array([0]), starts, p[:1], uniforms=uniforms, drawn="iid")
