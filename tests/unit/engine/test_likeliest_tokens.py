# SPDX-License-Identifier: Apache-2.0
"""What the target foresees at the rows of a step, and behind which two tokens."""

import numpy as np
import torch

from vllm_spec_ext.engine.verifying.likeliest_tokens import LikeliestTokens


def test_tokens_and_probabilities_are_those_of_the_softmax() -> None:
    logits = torch.randn(5, 301, generator=torch.Generator().manual_seed(0)) * 4
    before = logits.clone()
    found = LikeliestTokens.of(logits, 8)
    expected = logits.softmax(-1).topk(8)
    torch.testing.assert_close(found.probs, expected.values)
    assert torch.equal(found.tokens, expected.indices)
    assert torch.equal(logits, before)
    assert LikeliestTokens.of(logits[:, :3].bfloat16(), 8).tokens.shape == (5, 3)


def test_rows_belong_to_their_requests_and_contexts() -> None:
    rows = torch.arange(8)
    found = LikeliestTokens(rows[:, None], rows[:, None].float())
    histories = [(1, 2), (-1, -1), (-1, 9), (3, 4)]  # the second is in mid-prefill
    drafts = [[10, 11, 12], [], [], [-1]]  # the last one has a placeholder
    trees = [[-1, 0, 0], None, None, None]
    tree, prefill, short, resumed = found.of_requests(histories, drafts, trees)
    assert prefill is None
    assert tree is not None
    assert tree.contexts.tolist() == [[1, 2], [2, 10], [10, 11], [10, 12]]
    assert tree.tokens.ravel().tolist() == [0, 1, 2, 3]
    assert short is not None
    assert short.contexts.tolist() == [[-1, 9]]
    assert short.tokens.ravel().tolist() == [5]
    assert resumed is not None
    assert resumed.contexts.tolist() == [[3, 4]]
    assert resumed.probs.ravel().tolist() == [6.0]
    assert resumed.contexts.dtype == np.int32


def test_a_chain_needs_no_parents() -> None:
    found = LikeliestTokens(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1))
    (chain,) = found.of_requests([(7, 8)], [[1, 2]], [None])
    assert chain is not None
    assert chain.contexts.tolist() == [[7, 8], [8, 1], [1, 2]]


def test_what_fills_a_tree_up_says_nothing() -> None:
    """An asynchronous scheduler has as many rows verified whatever was drafted."""
    rows = torch.arange(6)
    found = LikeliestTokens(rows[:, None], rows[:, None].float())
    (tree,) = found.of_requests([(7, 8)], [[1, 2, 3, -1, -1]], [[-1, -1, 1]])
    assert tree is not None
    assert tree.contexts.tolist() == [[7, 8], [8, 1], [8, 2], [2, 3]]
    assert tree.tokens.ravel().tolist() == [0, 1, 2, 3]
