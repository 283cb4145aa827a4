# SPDX-License-Identifier: Apache-2.0
"""Walks over draft trees: which nodes stand, and which tokens the step emits.

Lossless for every way of sampling: the target draws **one** token at every row, and the walk goes
from the root to the child that equals the drawn token; where no child does, that same token is
emitted. Drawing once per path, or again after a mismatch, would emit drafted tokens too often.

With a relaxed rule the walk takes the child that equals the target's choice, else the tolerated
child with the highest target logit (the smaller token id among equals).

Rows of a batch, as in vLLM's logits: for each request its root row (the last verified token), then
one row for each node in draft order. Walks run on the host, compiled, over a whole batch.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_spec_ext.compiled import kernel

IntArray = NDArray[np.int64]
HostArray: TypeAlias = Tensor | NDArray[np.generic]  # what a walk accepts
ScalarT = TypeVar("ScalarT", bound=np.generic)


@dataclass(frozen=True)
class Walk:
    """What a step made of every request's tree."""

    accepted: IntArray  # [num_requests, max_depth + 1] node indices within the request, -1 padded
    emitted: IntArray  # [num_requests, max_depth + 2] token ids, -1 padded
    num_accepted: IntArray  # [num_requests]; num_accepted + 1 tokens are emitted

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """The accepted nodes of each request."""
        rows = zip(self.accepted.tolist(), self.num_accepted.tolist(), strict=True)
        return [tuple(nodes[:length]) for nodes, length in rows]


def node_rows(starts: HostArray) -> tuple[IntArray, IntArray]:
    """Rows of the batch layout.

    Args:
        starts: [num_requests + 1] first node of each request; the last entry is num_nodes.

    Returns:
        ``(root_rows, own_rows)``: [num_requests] row of each root, [num_nodes] row of each node.
    """
    first = host(starts, np.int64)
    requests = np.repeat(np.arange(len(first) - 1), np.diff(first))
    return first[:-1] + np.arange(len(first) - 1), np.arange(first[-1]) + requests + 1


def verifying_rows(parents: HostArray, starts: HostArray) -> IntArray:
    """[num_nodes] int64: the row that verifies each node, that is its parent's.

    Args:
        parents: [num_nodes] parent within the request, -1 = root.
        starts: [num_requests + 1] first node of each request.
    """
    roots, _ = node_rows(starts)
    first = host(starts, np.int64)
    return np.repeat(roots, np.diff(first)) + host(parents, np.int64) + 1


def node_depths(parents: HostArray, starts: HostArray) -> IntArray:
    """[num_nodes] int64: 0 for children of the root. Arguments as :func:`verifying_rows`.

    What :func:`vllm_spec_ext.proposers.draft_tree.node_depths` says of each request's tree, but for
    a whole batch at once and compiled, because the compiled walk needs it, too.
    """
    out = np.empty(len(parents), np.int64)
    _fill_depths(host(parents, np.int64), host(starts, np.int64), out)
    return out


def host(values: HostArray, dtype: type[ScalarT]) -> NDArray[ScalarT]:
    """The values as a contiguous array of that type, copied only if they are not one already."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return np.ascontiguousarray(array, dtype=dtype)


@kernel
def _fill_depths(parents, starts, out):  # type: ignore[no-untyped-def]
    deepest = -1
    for r in range(starts.shape[0] - 1):
        for i in range(starts[r], starts[r + 1]):
            parent = parents[i]
            out[i] = 0 if parent < 0 else out[starts[r] + parent] + 1
            deepest = max(deepest, out[i])
    return deepest


@kernel
def _next_child(  # type: ignore[no-untyped-def]
    parents, tokens, tolerated, draft_logits, first, end, node, choice
):
    best = -1
    for i in range(first + node + 1, end):  # children come after their parent
        if parents[i] != node:
            continue
        if tokens[i] == choice:
            return i - first
        if tolerated.shape[0] > 0 and tolerated[i]:
            ahead = best < 0 or draft_logits[i] > draft_logits[best]
            tie = best >= 0 and draft_logits[i] == draft_logits[best] and tokens[i] < tokens[best]
            if ahead or tie:
                best = i
    return best - first if best >= 0 else -1


@kernel
def _walk(  # type: ignore[no-untyped-def]
    parents, tokens, starts, choices, tolerated, draft_logits
):
    depths = np.empty(parents.shape[0], np.int64)
    width = _fill_depths(parents, starts, depths) + 1
    num_requests = starts.shape[0] - 1
    accepted = np.full((num_requests, width), -1, np.int64)
    emitted = np.full((num_requests, width + 1), -1, np.int64)
    num_accepted = np.zeros(num_requests, np.int64)
    for r in range(num_requests):
        first, end = starts[r], starts[r + 1]
        node = -1
        length = 0
        while True:
            choice = choices[first + r + 1 + node]
            child = _next_child(parents, tokens, tolerated, draft_logits, first, end, node, choice)
            if child < 0:
                emitted[r, length] = choice
                break
            accepted[r, length] = child
            emitted[r, length] = tokens[first + child]
            length += 1
            node = child
        num_accepted[r] = length
    return accepted, emitted, num_accepted


_NO_MASK = np.empty(0, np.bool_)
_NO_LOGITS = np.empty(0, np.float32)


def walk_samples(
    parents: HostArray,  # [num_nodes] parent within the request, -1 = root; parents come first
    tokens: HostArray,  # [num_nodes] draft token ids
    starts: HostArray,  # [num_requests + 1] first node of each request
    samples: HostArray,  # [num_nodes + num_requests] the target's draw (or argmax) at every row
) -> Walk:
    """The lossless walk: emitted tokens are the target's own draws.

    Exact if ``samples[row]`` is one draw of the target at that row, independent of the tree.

    Returns:
        Accepted nodes and emitted tokens; a request without nodes emits its root's draw.
    """
    return walk(parents, tokens, starts, samples, tolerated=_NO_MASK, draft_logits=_NO_LOGITS)


def walk(
    parents: HostArray,
    tokens: HostArray,
    starts: HostArray,
    target_choice: HostArray,
    *,
    tolerated: HostArray,  # [num_nodes] bool from a scorer
    draft_logits: HostArray,  # [num_nodes] float32, `Verification.draft_logits`
) -> Walk:
    """The walk under a relaxed rule; other arguments as :func:`walk_samples`.

    Returns:
        Accepted nodes and emitted tokens: the draft tokens of the path, then the target's choice.
    """
    first = host(starts, np.int64)
    rows = len(target_choice)
    if (
        len(parents) != len(tokens)
        or first[-1] != len(tokens)
        or rows != first[-1] + len(first) - 1
    ):
        raise ValueError(
            f"found {len(parents)} parents, {len(tokens)} tokens, {rows} choices for "
            f"{len(first) - 1} requests of {first[-1]} nodes in all; expected one parent and token "
            "a node and one choice for each node and each root"
        )
    return Walk(
        *_walk(
            host(parents, np.int64),
            host(tokens, np.int64),
            first,
            host(target_choice, np.int64),
            host(tolerated, np.bool_),
            host(draft_logits, np.float32),
        )
    )


def warm_up() -> None:
    """Compile the walk (about a second on a cold cache) before the first request."""
    walk_samples(np.array([-1]), np.array([0]), np.array([0, 1]), torch.zeros(2, dtype=torch.int64))
