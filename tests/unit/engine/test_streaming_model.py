# SPDX-License-Identifier: Apache-2.0
"""A draft model that sees the first and the last pages of its KV, against a dense computation."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from fake_model import request
from paged_toy import LAYERS, VOCAB, ToyModel

from vllm_spec_ext.engine.models.hosted_model import BatchRow, HostedModel
from vllm_spec_ext.proposers.base import ViewSpec

BLOCK = 4
SINK, RECENT = 1, 2  # pages
TEXT = [(3 * i * i + i) % VOCAB for i in range(30)]


def hosted(toy: ToyModel, view: ViewSpec | None) -> HostedModel:
    model = HostedModel(
        "toy",
        toy,
        num_ids=VOCAB,
        vocab_size=VOCAB,
        max_model_len=64,
        max_rows=64,
        view=view,
    )
    model.bind(12, BLOCK, range(12, 20))
    return model


def dense(toy: ToyModel, tokens: Sequence[int], starts: Sequence[int]) -> np.ndarray:
    """[len(tokens), VOCAB] logits; tokens are read in passes that begin at these positions."""
    seen = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for start, end in pairwise([*starts, len(tokens)]):
        recent_start = start // BLOCK - RECENT
        if recent_start > SINK:
            seen[start:end, SINK * BLOCK : recent_start * BLOCK] = False
    state = toy._embed(np.asarray(tokens), np.arange(len(tokens)))
    for layer in range(LAYERS):
        scores = state @ toy.query[layer] @ (state @ toy.key[layer]).T / state.shape[1]
        scores[~seen] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        state = state + weights @ (state @ toy.value[layer])
    return state @ toy.head


def row(tokens: Sequence[int]) -> BatchRow:
    blocks = np.arange(1, 1 + -(-len(tokens) // BLOCK), dtype=np.int32)
    return BatchRow("a", blocks, np.array(tokens, np.int32), False)


@pytest.mark.parametrize("budget", [(SINK + RECENT) * BLOCK, 40])
def test_it_sees_the_first_and_the_last_pages(budget: int) -> None:
    toy = ToyModel(5, 20, BLOCK)
    toy.streams = budget < 40
    model = hosted(toy, ViewSpec("stream", "stream", budget, sink=SINK * BLOCK))
    starts = [0]
    model.begin_step([row(TEXT[:18])])
    (trunk,) = model.sync([request(TEXT[:18])], [0], [TEXT[18:20]])
    assert trunk is not None
    found = [model.all_logits(trunk), model.logits([trunk])]
    for start, end in ((20, 21), (21, 23), (23, 24)):
        model.extend([trunk], [TEXT[start:end]])
        starts.append(start)
        found.append(model.read_logits(trunk))
    right = dense(toy, TEXT[:24], starts if toy.streams else [0])
    np.testing.assert_allclose(np.concatenate(found), right[17:], atol=1e-5)
    (fork,) = model.fork([trunk])
    assert fork is not None
    model.extend([fork], [TEXT[24:26]])
    right = dense(toy, TEXT[:26], [*starts, 24] if toy.streams else [0])
    np.testing.assert_allclose(model.read_logits(fork), right[24:], atol=1e-5)
    model.end_step(True)
    # All but the last two were accepted; what they were read with stays.
    model.begin_step([row([*TEXT[:22], 1])])
    (trunk,) = model.sync([request([*TEXT[:22], 1])], [0])
    assert trunk is not None
    right = dense(toy, [*TEXT[:22], 1], [*starts[:3], 22] if toy.streams else [0])
    np.testing.assert_allclose(model.logits([trunk]), right[22:], atol=1e-5)


def test_what_is_hidden_makes_a_difference() -> None:
    """The control: with everything in sight the logits are others."""
    toy = ToyModel(5, 20, BLOCK)
    whole, part = dense(toy, TEXT[:24], [0]), dense(toy, TEXT[:24], [0, 20])
    assert np.abs(whole[20:] - part[20:]).max() > 0.01
