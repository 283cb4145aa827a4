# SPDX-License-Identifier: Apache-2.0
"""The kernel of ``adaptive_ngram`` that drafts behind unread tokens: in Triton's interpreter."""

import pytest
import triton.language as tl
from hypothesis import given, settings
from late_device import LateDevice
from late_ngram_sessions import (
    ENGINE,
    SESSIONS,
    K,
    Session,
    moments,
    start,
)
from triton_cpu_stub import plugin  # type: ignore[import-not-found]

from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram, late_kernels


@pytest.fixture(autouse=True)
def _few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is searched in several rounds, though it is small."""
    plugin.register()  # as in an engine
    monkeypatch.setattr(late_kernels, "PROBES", tl.constexpr(2))


def device_of(proposer: AdaptiveNgram) -> LateDevice:
    late = proposer.late_drafter(ENGINE)
    assert not isinstance(late, str)
    return LateDevice(late)


def filled(drafted: list[int], text: list[int]) -> list[int]:
    """As many tokens as are verified."""
    return [*drafted, *[text[-1]] * (K - len(drafted))]


@settings(max_examples=40)
@given(SESSIONS)
def test_a_device_drafts_the_same(session: Session) -> None:
    proposer = start(session.options)
    for moment in moments(session, proposer, device_of(proposer).draft):
        assert moment.late == list(map(filled, moment.drafted, moment.texts))
