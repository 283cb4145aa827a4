# SPDX-License-Identifier: Apache-2.0
"""What the target foresees at the rows of a step, and behind which two tokens."""

import numpy as np
import pytest
import torch

from vllm_spec_ext.engine.verifying import likeliest_tokens as module
from vllm_spec_ext.engine.verifying.likeliest_tokens import LikeliestTokens


# 301 columns are too few to be searched in chunks.
@pytest.mark.parametrize(("rows", "columns"), [(1, 49152), (5, 49157), (33, 3000), (5, 301)])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_tokens_and_probabilities_are_those_of_the_softmax(
    rows: int, columns: int, scale: float
) -> None:
    wide = torch.randn(rows, columns + 7, generator=torch.Generator().manual_seed(0)) * scale
    logits = wide[:, :columns]  # as of a vocabulary that is padded
    logits[:, 3:60] = -torch.inf
    before = wide.clone()
    found = LikeliestTokens.of(logits, 8)
    expected = logits.double().softmax(-1).topk(8)
    torch.testing.assert_close(found.probs, expected.values.float(), rtol=2e-5, atol=1e-30)
    assert torch.equal(found.tokens, expected.indices.int())
    assert found.tokens.dtype == torch.int32
    assert torch.equal(wide, before)


def test_rows_of_a_large_batch_are_searched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 3000, generator=torch.Generator().manual_seed(1))
    whole = LikeliestTokens.of(logits, 4)
    sizes: list[int] = []
    search = module.top_log_probs

    def watched(part: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(part))
        return search(part, count)

    monkeypatch.setattr(module, "top_log_probs", watched)
    monkeypatch.setattr(module, "_MOST_ENTRIES", 9500)
    parts = LikeliestTokens.of(logits, 4)
    assert sizes == [3, 3, 1]
    assert torch.equal(parts.tokens, whole.tokens)
    assert torch.equal(parts.probs, whole.probs)
    assert LikeliestTokens.of(logits[:0], 4).tokens.shape == (0, 4)


def test_all_are_named_where_there_are_fewer() -> None:
    assert LikeliestTokens.of(torch.randn(5, 3).bfloat16(), 8).tokens.shape == (5, 3)


@pytest.mark.parametrize("fill", [-torch.inf, torch.nan])
def test_rows_that_say_nothing_name_tokens_all_the_same(fill: float) -> None:
    """A grammar or a broken model may leave nothing; what is named lies in the vocabulary."""
    logits = torch.full((2, 2048), fill)
    logits[1, 700] = 2.0
    found = LikeliestTokens.of(logits, 8)
    assert ((found.tokens >= 0) & (found.tokens < 2048)).all()
    if fill == -torch.inf:
        assert found.tokens[1, 0] == 700
        assert found.probs[1].tolist() == [1.0, *[0.0] * 7]


def test_rows_belong_to_their_requests_and_contexts() -> None:
    rows = torch.arange(8)
    found = LikeliestTokens(rows[:, None].int(), rows[:, None].float())
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
    found = LikeliestTokens(torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, 1))
    (chain,) = found.of_requests([(7, 8)], [[1, 2]], [None])
    assert chain is not None
    assert chain.contexts.tolist() == [[7, 8], [8, 1], [1, 2]]


def test_what_fills_a_tree_up_says_nothing() -> None:
    """An asynchronous scheduler has as many rows verified whatever was drafted."""
    rows = torch.arange(6)
    found = LikeliestTokens(rows[:, None].int(), rows[:, None].float())
    (tree,) = found.of_requests([(7, 8)], [[1, 2, 3, -1, -1]], [[-1, -1, 1]])
    assert tree is not None
    assert tree.contexts.tolist() == [[7, 8], [8, 1], [8, 2], [2, 3]]
    assert tree.tokens.ravel().tolist() == [0, 1, 2, 3]
