# SPDX-License-Identifier: Apache-2.0
"""Verifies drafts whose tokens were drawn, with the distributions that they were drawn from.

A drawn token is accepted by how likely it is to the target *and* to its drafter: speculative
sampling, and for siblings SpecInfer's multi-step rule (:mod:`vllm_spec_ext.scorers.walk`).
The output is distributed as with the target's own draws, and more drawn tokens are accepted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.proposers.base import Drawn
from vllm_spec_ext.scorers.walk.multi_step import draw_uniforms, multi_step
from vllm_spec_ext.scorers.walk.tree import HostArray, Walk


@dataclass(frozen=True)
class DraftDistributions:
    """The distributions of one request's draft."""

    probs: torch.Tensor  # [num_nodes, vocab] float32
    drawn: Drawn


def verified_rows(batch: DraftBatch, requests: Iterable[int]) -> np.ndarray:
    """[n] int64: all rows of these requests, in their order."""
    return np.concatenate(
        [
            np.arange(batch.root_rows[r], batch.root_rows[r] + 1 + _num_nodes(batch, r))
            for r in requests
        ]
    )


def _num_nodes(batch: DraftBatch, request: int) -> int:
    """Nodes of a request that are verified; a tree that found no room was cut, at its end."""
    first, end = batch.node_starts[request : request + 2]
    dropped = np.flatnonzero(batch.tokens[first:end] < 0)
    return int(dropped[0]) if len(dropped) else int(end - first)


def verify_drawn(
    batch: DraftBatch,
    distributions: Mapping[int, DraftDistributions],
    target_distributions: torch.Tensor,
    choices: HostArray,
    walk: Walk,
) -> Walk:
    """Verify the drawn drafts of a batch; the other requests' part of ``walk`` stays.

    In a row in which nothing may be said (parameters that contradict each other, logits that are no
    numbers) there is no distribution: there the target says what vLLM's sampler made of the row, as
    in plain decoding.

    Args:
        batch: Rows and draft nodes of the step.
        distributions: Request index -> the distributions its nodes were drawn from.
        target_distributions: [n, vocab] of the rows :func:`verified_rows` of these requests.
        choices: [num_rows] the target's own draws, of all rows.
        walk: Of all requests, by the target's own draws.
    """
    on_host = target_distributions.cpu()
    accepted, emitted = walk.accepted.copy(), walk.emitted.copy()
    num_accepted = walk.num_accepted.copy()
    row = 0
    for request, own in distributions.items():
        first, size = int(batch.node_starts[request]), _num_nodes(batch, request)
        own_rows = on_host[row : row + size + 1]
        row += size + 1
        (silent,) = own_rows[:, 0].isnan().nonzero(as_tuple=True)  # of nothing all is NaN
        if len(silent):
            said = choices[int(batch.root_rows[request]) + silent.numpy()]
            own_rows = own_rows.clone()
            own_rows[silent] = 0.0
            own_rows[silent, torch.from_numpy(said.astype(np.int64))] = 1.0
        starts = np.array([0, size], np.int64)
        taken = multi_step(
            own_rows,
            batch.parents[first : first + size],
            batch.tokens[first : first + size],
            starts,
            own.probs[:size],
            uniforms=draw_uniforms(starts),
            drawn=own.drawn,
        )
        for whole, part in ((accepted, taken.accepted), (emitted, taken.emitted)):
            whole[request] = -1
            whole[request, : part.shape[1]] = part[0]
        num_accepted[request] = taken.num_accepted[0]
    return Walk(accepted, emitted, num_accepted)
