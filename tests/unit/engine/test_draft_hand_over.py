# SPDX-License-Identifier: Apache-2.0
"""Drafts on their way to the device of a V2 runner."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_spec_ext.engine.v2.speculator import HostDraftTokens, HostSpeculator


def batch(places: dict[str, int]) -> Any:
    """Requests and their places in vLLM's tables."""
    mapping = np.array(list(places.values()), np.intp)
    return SimpleNamespace(req_ids=list(places), idx_mapping_np=mapping, num_reqs=len(places))


def test_drafts_of_others_stay_where_they_are() -> None:
    on_device = torch.zeros(4, 3, dtype=torch.int64)
    tokens = HostDraftTokens(on_device, is_async=False)
    tokens.hand_over(batch({"a": 2, "b": 0}), [[7, 8, 9], [5]], [[1], [2, 4]], 3)
    # Short ones are filled up with the last token.
    assert on_device.tolist() == [[5, 4, 4], [0] * 3, [7, 8, 9], [0] * 3]
    found = tokens.get_draft_tokens()
    assert (found.req_ids, found.draft_token_ids) == (["a", "b"], [[7, 8, 9], [5]])
    on_device[1] = -1  # what vLLM writes for a request that it drafts nothing for
    tokens.hand_over(batch({"c": 1}), [[]], [[]], 3)
    assert tokens.get_draft_tokens().draft_token_ids == [[]]
    assert on_device[[0, 2, 3]].tolist() == [[5, 4, 4], [7, 8, 9], [0] * 3]
    tokens.hand_over(batch({"c": 1}), [[6]], [[]], 3)
    assert on_device.tolist() == [[5, 4, 4], [6, 0, 0], [7, 8, 9], [0] * 3]


def test_an_asynchronous_step_reads_what_stands_for_drafts() -> None:
    on_device = torch.full((2, 3), 7, dtype=torch.int64)
    tokens = HostDraftTokens(on_device, is_async=True)
    tokens.hand_over(batch({"a": 1}), [[]], [[5, 8]], 2)
    assert on_device[1].tolist() == [8, 8, 8]
    assert tokens.get_draft_tokens().draft_token_ids == [[8, 8]]


def test_what_vllm_writes_into_a_stand_in_is_no_draft() -> None:
    on_device = torch.arange(12).view(4, 3)
    before = on_device.clone()
    given = HostSpeculator(on_device).propose(batch({"a": 2, "b": 0}))
    given[:, 1:] = -1  # vLLM 0.32 `sample_tokens`, where fewer are scheduled
    assert given.shape == (2, 3)
    assert torch.equal(on_device, before)
