# SPDX-License-Identifier: Apache-2.0
"""Columns of a draft vocabulary, and the one of a copied token that is not in it."""

import torch

from vllm_spec_ext.proposers.draft_columns import DraftColumns

COLUMNS = DraftColumns(torch.tensor([2, 5, 7], dtype=torch.int32), 10)
SHOWN = torch.tensor([5, 4, -1])  # listed, not listed, nothing


def test_places_and_tokens_are_each_others() -> None:
    tokens = torch.tensor([7, 4, 4])
    assert COLUMNS.places(tokens).tolist() == [2, -1, -1]
    assert COLUMNS.places(tokens, SHOWN).tolist() == [2, 3, -1]
    assert COLUMNS.places(torch.tensor([-1, -100])).tolist() == [-1, -100]
    assert COLUMNS.places(SHOWN, SHOWN).tolist() == [1, 3, -1]
    assert COLUMNS.tokens(torch.tensor([2, 0])).tolist() == [7, 2]
    places = torch.tensor([[2, 0], [3, 1], [1, 1]])
    assert COLUMNS.tokens(places, SHOWN).tolist() == [[7, 2], [4, 5], [5, 5]]
    assert COLUMNS.tokens(places[:, 0], SHOWN).tolist() == [7, 4, 5]


def test_only_what_is_not_listed_has_a_column() -> None:
    logits = torch.zeros(3, 3)
    wide = COLUMNS.append(logits, torch.tensor([9.0, 1.5, 9.0]), SHOWN)
    assert wide.shape == (3, 4)
    assert torch.equal(wide[:, :3], logits)
    probs = wide.softmax(-1)
    assert (probs[:, 3] > 0.0).tolist() == [False, True, False]
    assert float(wide[1, 3]) == 1.5
    assert COLUMNS.append(logits.bfloat16(), torch.ones(3), SHOWN).dtype == torch.bfloat16
