# SPDX-License-Identifier: Apache-2.0
"""One context's successors: corpus and overlays merged, with back-off to shorter contexts.

``w = p_base + request_weight * w_request + shared_weight * w_shared``, beside ``unseen_weight`` for
all that the overlays did not see yet: what followed once is not certain to follow again, and what
followed three times is more so. Where these sum to more than 1, they are divided by their sum. The
probability that a two-token context leaves open goes to the one-token context, and where both are
unknown to the corpus's most frequent tokens.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.compiled import kernel
from vllm_spec_ext.proposers.adaptive_ngram.overlay import OverlayArrays, decay_factor, find_row
from vllm_spec_ext.proposers.corpus.rows import base_entries, find_base_row
from vllm_spec_ext.proposers.corpus.store import MAX_SUCCESSORS, PROB_TABLE, BaseArrays

MAX_ROW = 64  # two merged rows of at most 16 + 8 + 8 successors
BACKOFF = {"off": 0, "empty": 1, "mix": 2}


class Lookup(NamedTuple):
    """Settings of a look-up."""

    vocab_size: int
    backoff: int  # value of BACKOFF
    backoff_weight: float
    request_weight: float  # 0 = no such overlay
    shared_weight: float
    request_half_life: float
    shared_half_life: float
    normalise: bool
    unseen_weight: float


@kernel
def put(
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    count: int,
    first: int,
    last: int,
    token: int,
    weight: float,
) -> int:
    """Add weight to a token among entries [first, last), or append it; returns the new count."""
    for place in range(first, last):
        if tokens[place] == token:
            probs[place] += weight
            return count
    tokens[count] = token
    probs[count] = weight
    return count + 1


@kernel
def put_overlay(
    arrays: OverlayArrays,
    slot: int,
    w1: int,
    w2: int,
    half_life: float,
    weight: float,
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    count: int,
    first: int,
) -> int:
    """Merge an overlay's row into entries [first, count); returns the new count."""
    row = find_row(arrays, slot, w1, w2)
    if row < 0:
        return count
    weight *= decay_factor(arrays.clocks[slot] - arrays.stamps[slot, row], half_life)
    last = count  # a row's own entries differ, so they are not compared with each other
    for place in range(8):
        if arrays.weights[slot, row, place] > 0.0:
            share = weight * arrays.weights[slot, row, place]
            count = put(tokens, probs, count, first, last, arrays.tokens[slot, row, place], share)
    return count


@kernel
def context_row(
    base: BaseArrays,
    request: OverlayArrays,
    slot: int,
    shared: OverlayArrays,
    settings: Lookup,
    w1: int,
    w2: int,
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    first: int,
) -> tuple[int, float]:
    """Append the merged, unscaled row of one context from place ``first`` on.

    Returns:
        The new count, and how much of the weight is the corpus's.
    """
    count = first
    known = 0.0
    row = find_base_row(base, w1, w2)
    if row >= 0:
        low, high = base_entries(base, row)
        for place in range(low, high):
            token = np.int64(base.tok[place])
            if token < settings.vocab_size:
                tokens[count] = token
                probs[count] = PROB_TABLE[base.prob[place]]
                known += probs[count]
                count += 1
    if settings.request_weight > 0.0 and slot >= 0:
        count = put_overlay(
            request,
            slot,
            w1,
            w2,
            settings.request_half_life,
            settings.request_weight,
            tokens,
            probs,
            count,
            first,
        )
    if settings.shared_weight > 0.0:
        count = put_overlay(
            shared,
            0,
            w1,
            w2,
            settings.shared_half_life,
            settings.shared_weight,
            tokens,
            probs,
            count,
            first,
        )
    return count, known


@kernel
def unigrams(
    base: BaseArrays,
    settings: Lookup,
    weight: float,
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
) -> int:
    """Fill in the corpus's most frequent tokens, the last resort; returns their number."""
    count = 0
    for place in range(min(len(base.uni_tok), MAX_SUCCESSORS)):
        token = np.int64(base.uni_tok[place])
        if token < settings.vocab_size:
            tokens[count] = token
            probs[count] = PROB_TABLE[base.uni_prob[place]] * weight
            count += 1
    return count


@kernel
def successors(
    base: BaseArrays,
    request: OverlayArrays,
    slot: int,
    shared: OverlayArrays,
    settings: Lookup,
    w1: int,
    w2: int,
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
) -> int:
    """Successors of (w1, w2) with their probabilities, unsorted.

    Args:
        base: The store; without rows where there is none.
        request: Overlays by request.
        slot: The request's overlay, -1 = none.
        shared: The shared overlay, in slot 0.
        settings: See :class:`Lookup`.
        w1: Second-last token; negative or outside the vocabulary = unknown.
        w2: Last token, inside the vocabulary.
        tokens: [MAX_ROW] int32, filled.
        probs: [MAX_ROW] float32, filled; they sum to at most 1 where ``normalise`` is set.

    Returns:
        Number of successors.
    """
    count = 0  # successors of the two-token context
    end = 0
    weight = 1.0
    scale = 1.0
    # One call site for both contexts: LLVM copies the look-up into each, and compiling takes long.
    for level in range(2):
        first = w1 if level == 0 else settings.vocab_size
        if first < 0 or (level == 0 and first >= settings.vocab_size):
            continue
        end, known = context_row(
            base, request, slot, shared, settings, first, w2, tokens, probs, count
        )
        total = 0.0
        for place in range(count, end):
            total += probs[place]
        # What faded out of the overlays speaks of the unseen as little as of the seen.
        scale = max(1.0, total + settings.unseen_weight * min(1.0, total - known))
        if level == 1:
            break
        count = end
        if settings.normalise:
            for place in range(count):
                probs[place] /= scale
            total /= scale
        rest = 1.0 - total
        if settings.backoff == 0 or (settings.backoff == 1 and count > 0) or rest <= 0.02:
            return count
        weight = rest
    if settings.backoff == 0:
        return count
    weight *= settings.backoff_weight
    if end == 0:
        return unigrams(base, settings, weight * settings.backoff_weight, tokens, probs)
    weight /= scale
    merged = count
    for place in range(count, end):
        # The write never overtakes the read: put() appends at most one entry an iteration.
        merged = put(tokens, probs, merged, 0, count, tokens[place], probs[place] * weight)
    return merged
