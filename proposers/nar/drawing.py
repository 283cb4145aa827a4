# SPDX-License-Identifier: Apache-2.0
"""A chain of draws from the slots' candidates, each given the one before."""

import math

import numpy as np
import torch

from vllm_spec_ext.proposers.base import EMPTY_DRAFT, Draft, RequestStep
from vllm_spec_ext.proposers.growth.drawing import distributions, draw, uniforms
from vllm_spec_ext.proposers.models import SlotCandidates


def drawn_chain(
    request: RequestStep, found: SlotCandidates, limit: float, vocab_size: int
) -> Draft:
    """Draw one token a slot, with its distribution, for speculative sampling.

    Whether a further token is drawn depends on the path before it and on its distribution, never on
    the token itself, as it must.

    Args:
        request: With a temperature.
        found: Candidates of its slots; tokens that are none have probability 0.
        limit: Log-probability below which a path is not drawn further.
        vocab_size: The target's.
    """
    numbers = uniforms(request.request_id, len(request.token_ids), 0, len(found.tokens))
    tokens: list[int] = []
    reach: list[float] = []
    probs = torch.zeros(len(found.tokens), vocab_size)
    before, path = 0, 0.0
    for slot, (ids, rows) in enumerate(zip(found.tokens, found.log_probs, strict=True)):
        row = torch.from_numpy(rows[before if len(rows) > 1 else 0])[None]
        drawn_from = distributions(row, [request.temperature], [request.top_k], [request.top_p])
        # Chance that a target of the same distribution would draw the same token.
        path += math.log(max(float(drawn_from.square().sum() * row.exp().sum()), 1e-30))
        if path < limit:
            break
        before = int(draw(drawn_from, numbers[slot : slot + 1][None])[0, 0])
        tokens.append(int(ids[before]))
        reach.append(path)
        probs[slot, torch.from_numpy(ids).long()] = drawn_from[0]
    if not tokens:
        return EMPTY_DRAFT
    return Draft(
        np.array(tokens, np.int32),
        probs=probs[: len(tokens)],
        path_probs=np.exp(np.array(reach, np.float32)),
    )
