# SPDX-License-Identifier: Apache-2.0
"""Kernels that draft behind tokens which the host has not read: in Triton's interpreter."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from late_sessions import (
    ENGINE,
    FOLDED,
    SESSIONS,
    WELL_COPIED,
    K,
    Request,
    Session,
    moments,
    start,
    step_of,
)
from triton_cpu_stub import plugin  # type: ignore[import-not-found]

from vllm_spec_ext.proposers.base import DeviceTexts, RequestStep
from vllm_spec_ext.proposers.input_copy import InputCopy, late_copy
from vllm_spec_ext.proposers.input_copy.late_copy import LateCopy
from vllm_spec_ext.proposers.input_copy.late_reference import late_draft

PLACES = np.array([3, 1], np.intp)
SILENT = step_of("silent", Request([5, 5], [], {"enabled": False}), [], [])
"""Another request of the batch, for which nothing is drafted."""


class Device:
    """The texts of a batch of two."""

    def __init__(self, proposer: InputCopy) -> None:
        self.late = LateCopy(proposer, proposer.options, FOLDED, ENGINE)
        self.tokens = torch.zeros(4, 200, dtype=torch.int32)
        self.lengths = torch.zeros(4, dtype=torch.int32)

    def draft(self, known: RequestStep, text: Sequence[int]) -> list[list[int]]:
        for place, one in zip(PLACES.tolist(), (text, [5, 5, 4]), strict=True):
            self.tokens[place, : len(one)] = torch.tensor(one)
            self.lengths[place] = len(one)
        places = torch.from_numpy(PLACES).long()
        texts = DeviceTexts(self.tokens, self.lengths, places, PLACES, torch.tensor)
        return self.late.draft([known, SILENT], texts).tolist()


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and several parts of them, though texts are short."""
    plugin.register()  # as in an engine
    monkeypatch.setattr(late_copy, "_BLOCK", 8)
    monkeypatch.setattr(late_copy, "_CHUNK", 2)


@settings(max_examples=25, deadline=None)
@given(SESSIONS)
@example(WELL_COPIED)
def test_a_device_drafts_the_same(session: Session) -> None:
    proposer = start(session.options)
    device = Device(proposer)
    for moment in moments(session, proposer, device.draft):
        last = moment.texts.said[-1]
        expected = [*moment.drafted, *[last] * (K - len(moment.drafted))]
        assert moment.late == [expected, [4] * K]
        found = late_draft(moment.before, moment.texts, FOLDED.tolist(), proposer.options, K)
        assert found == moment.drafted


def test_with_more_new_tokens_than_a_step_gives_nothing_is_drafted() -> None:
    proposer = start({})
    prompt = list(range(8)) * 3
    request = Request(prompt, [])
    known = step_of("r", request, [], [])
    device = Device(proposer)
    assert device.draft(known, prompt + prompt[:K])[0] == prompt[K : 2 * K]
    # The block of new tokens is a power of two.
    assert device.draft(known, prompt + prompt[:9])[0] == [prompt[8]] * K


def test_a_request_may_bound_its_drafts() -> None:
    proposer = start({})
    known: Any = step_of("r", Request(list(range(8)), []), [], [])
    known = type(known)(**{**vars(known), "room": 2})
    assert Device(proposer).draft(known, [*range(8), 0, 1])[0] == [2, 3, 1, 1, 1, 1]
