# SPDX-License-Identifier: Apache-2.0
"""Blocks, what they are shown, and their weights; against values worked out by hand."""

import numpy as np
import torch

from vllm_spec_ext.training.batches import IGNORED, Batch
from vllm_spec_ext.training.nar.blocks import (
    arrange,
    block_ids,
    choose_kinds,
    glanced,
    prefix_shown,
)
from vllm_spec_ext.training.nar.losses import path_weights
from vllm_spec_ext.training.nar.pass_batch import context_states, some_sequences


def batch() -> Batch:
    """Two texts, three positions; slots 2."""
    return Batch(
        sequences=np.array([5, 9]),
        token_ids=torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]),
        mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        rows=torch.tensor([0, 0, 1]),
        columns=torch.tensor([1, 2, 1]),
        next_tokens=torch.tensor([3, 4, 8]),
        targets=torch.tensor([[4, 5], [5, IGNORED], [9, IGNORED]]),
        inputs=(torch.tensor([[11, 12], [13, 14], [15, 16]]), torch.tensor([2, 0, 3])),
    )


def test_blocks_stand_behind_their_context() -> None:
    blocks = arrange(batch(), np.array([1, 0, 2]), np.array([True, True, True]))
    assert blocks.anchors.tolist() == [[2, 3], [2, 1]]  # the last one has no targets
    assert blocks.first.tolist() == [[3, 4], [8, 0]]
    assert blocks.targets.tolist()[1] == [[9, IGNORED], [IGNORED, IGNORED]]
    assert blocks.before().tolist()[0] == [[3, 4], [4, 5]]
    assert blocks.copies is not None
    assert blocks.kinds is not None
    assert blocks.copies.tolist()[1][0] == [15, 16]
    assert blocks.kinds.tolist()[1] == [[3, 3], [0, 0]]
    shown = prefix_shown(blocks)
    assert shown.tolist() == [
        [[True, False], [False, False]],
        [[True, False], [False, False]],  # two were asked for, one is there
    ]
    assert block_ids(blocks, shown, 99).tolist()[0] == [[3, 4, 99], [4, 99, 99]]


def test_some_blocks_of_a_batch() -> None:
    blocks = arrange(batch(), np.zeros(3, np.int64), np.array([False, True, False]))
    assert blocks.anchors.tolist() == [[3], [1]]
    assert blocks.targets.tolist() == [[[5, IGNORED]], [[IGNORED, IGNORED]]]


def test_a_part_of_a_batch_has_the_states_of_its_texts() -> None:
    part, places = some_sequences(batch(), 1, 2)
    assert places.tolist() == [2]
    assert part.token_ids.tolist() == [[6, 7, 8, 9]]
    asked = []

    def states(given: Batch) -> torch.Tensor:
        asked.append(given.columns.tolist())
        return given.token_ids[given.rows, given.columns].unsqueeze(1).float()

    assert context_states(states, part, torch.device("cpu")).tolist() == [[[6], [7], [8], [9]]]
    table = context_states(states, batch(), torch.device("cpu"))
    assert table[..., 0].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    assert asked[0] == [0, 1, 2, 3]


def test_kinds_have_their_parts() -> None:
    kinds = choose_kinds(100, 6, 0.25, 0.5, np.random.default_rng(0))
    assert kinds.glances.sum() == 25
    assert (kinds.prefix > 0).sum() == 50
    assert not (kinds.glances & (kinds.prefix > 0)).any()
    assert set(kinds.prefix.tolist()) == {0, 1, 2, 3, 4, 5}  # never the whole block
    assert not choose_kinds(10, 1, 0.0, 1.0, np.random.default_rng(0)).prefix.any()


def test_a_glance_shows_a_part_of_the_wrong_guesses() -> None:
    targets = torch.tensor([[[7, 8, 9, 3], [7, 8, IGNORED, IGNORED]]])
    wrong = torch.tensor([[[True, True, True, True], [True, True, True, True]]])
    draws = torch.tensor([[[0.9, 0.1, 0.5, 0.2], [0.6, 0.3, 0.0, 0.0]]])
    shown = glanced(wrong, targets, 0.5, draws)
    assert shown.tolist() == [[[False, True, False, True], [False, True, False, False]]]
    # The fewer guesses are wrong, the less is shown; slots may be others than the wrong ones.
    wrong = torch.tensor([[[True, False, False, True], [False, False, False, False]]])
    shown = glanced(wrong, targets, 0.5, draws)
    assert shown.tolist() == [[[False, True, False, False], [False, False, False, False]]]


def test_path_weights_by_hand() -> None:
    """Factors 1, 3/4, 1/2: reached 1, 3/4, 3/8; each slot counts for itself and those behind."""
    weights = path_weights(
        torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]]),
        torch.tensor([[True, True, True], [True, False, False]]),
    )
    expected = [[2.125, 1.125, 0.375], [1.0, 0.0, 0.0]]
    assert torch.allclose(weights, torch.tensor(expected))
