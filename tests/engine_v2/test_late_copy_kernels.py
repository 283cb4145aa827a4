# SPDX-License-Identifier: Apache-2.0
"""Kernels of ``input_copy`` that draft behind unread tokens: in Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from late_device import LateDevice
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

from vllm_spec_ext.proposers.base import RequestStep
from vllm_spec_ext.proposers.input_copy import InputCopy, late_copy
from vllm_spec_ext.proposers.input_copy.late_copy import LateCopy
from vllm_spec_ext.proposers.input_copy.late_reference import late_draft

SILENT = step_of("silent", Request([5, 5], [], {"enabled": False}), [], [])
"""Another request of the batch, for which nothing is drafted."""


class Counted(LateCopy):
    """Keeps the numbers beside its last drafts."""

    copied: list[list[int]]

    def draft(self, *given: Any) -> torch.Tensor:
        drafts, copied = self.draft_counted(*given)
        self.copied = copied.tolist()
        return drafts


class Device(LateDevice):
    """Of two requests, one of which is silent."""

    def __init__(self, proposer: InputCopy) -> None:
        self.counted = Counted(proposer, proposer.options, FOLDED, ENGINE)
        super().__init__(self.counted)

    def draft_beside(self, known: RequestStep, text: Sequence[int]) -> list[list[int]]:
        return self.draft([known, SILENT], [text, [5, 5, 4]])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and several parts of them, though texts are short."""
    plugin.register()  # as in an engine
    monkeypatch.setattr(late_copy, "_BLOCK", 8)
    monkeypatch.setattr(late_copy, "_CHUNK", 2)


@settings(max_examples=25)
@given(SESSIONS)
@example(WELL_COPIED)
def test_a_device_drafts_the_same(session: Session) -> None:
    proposer = start(session.options)
    device = Device(proposer)
    for moment in moments(session, proposer, device.draft_beside):
        last = moment.texts.said[-1]
        expected = [*moment.drafted, *[last] * (K - len(moment.drafted))]
        assert moment.late == [expected, [4] * K]
        (num_copied, num_before), (beside, _) = device.counted.copied
        assert (num_copied, beside) == (len(moment.drafted), 0)
        if num_copied:
            assert num_before == proposer.num_before(moment.request.request_id)
        found = late_draft(moment.before, moment.texts, FOLDED.tolist(), proposer.options, K)
        assert found == moment.drafted


def test_with_more_new_tokens_than_a_step_gives_nothing_is_drafted() -> None:
    proposer = start({})
    prompt = list(range(8)) * 3
    request = Request(prompt, [])
    known = step_of("r", request, [], [])
    device = Device(proposer)
    assert device.draft_beside(known, prompt + prompt[:K])[0] == prompt[K : 2 * K]
    # The block of new tokens is a power of two.
    assert device.draft_beside(known, prompt + prompt[:9])[0] == [prompt[8]] * K


def test_a_request_may_bound_its_drafts() -> None:
    proposer = start({})
    known: Any = step_of("r", Request(list(range(8)), []), [], [])
    known = replace(known, room=2)
    assert Device(proposer).draft_beside(known, [*range(8), 0, 1])[0] == [2, 3, 1, 1, 1, 1]
