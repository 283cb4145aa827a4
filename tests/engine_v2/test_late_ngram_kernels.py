# SPDX-License-Identifier: Apache-2.0
"""The kernel of ``adaptive_ngram`` that drafts behind unread tokens: in Triton's interpreter."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateDevice
from late_ngram_sessions import (
    ENGINE,
    SESSIONS,
    VOCAB,
    K,
    Request,
    Session,
    moments,
    start,
)
from triton_cpu_stub import plugin  # type: ignore[import-not-found]

from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram, late_kernels
from vllm_spec_ext.proposers.adaptive_ngram.late_copies import WEAK, Copied, behind_copies
from vllm_spec_ext.proposers.base import DeviceTexts, Draft, RequestStep, StepContext, chain


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


class WithCopies:
    """Tri-grams behind copies of any kind: on the device, and on the host, which follows it."""

    def __init__(self, proposer: AdaptiveNgram, seed: int) -> None:
        self.proposer, self.finish = proposer, proposer.finish
        self.late = proposer.late_behind_copies(ENGINE)
        self.start = self.late.start
        self.random = np.random.default_rng(seed)
        self.copies: list[Copied] = []
        self.num_kept = self.num_replaced = 0

    def draft(self, requests: Sequence[RequestStep], texts: DeviceTexts) -> torch.Tensor:
        self.copies = [self.copy(request.room) for request in requests]
        ends = texts.tokens[texts.places, texts.lengths[texts.places].long() - 1]
        drafts = ends.long()[:, None].repeat(1, K)
        for row, copy in enumerate(self.copies):
            drafts[row, : len(copy.tokens)] = torch.from_numpy(copy.tokens)
        counts = [(len(copy.tokens), copy.num_before) for copy in self.copies]
        self.late.draft_behind(requests, texts, drafts, torch.tensor(counts, dtype=torch.int32))
        return drafts

    def copy(self, room: int) -> Copied:
        """Of tokens that the model can say, one of which the corpus does not know."""
        size = int(self.random.integers(0, room + 1))
        tokens = self.random.integers(0, VOCAB, size).astype(np.int32)
        return Copied(tokens, int(self.random.integers(0, WEAK + 3)))

    def propose(self, step: StepContext) -> list[Draft]:
        made = behind_copies(self.proposer.drafter, step, self.copies)
        self.proposer.drafter.learn_known(step.requests)
        for one, copy in zip(made, self.copies, strict=True):
            self.num_kept += len(one.copied) > 0
            self.num_replaced += len(copy.tokens) > len(one.copied)
        return [chain([*one.copied, *one.behind]) for one in made]


@settings(max_examples=40)
@given(SESSIONS, st.integers(0, 99))
def test_a_device_goes_on_where_copies_end(session: Session, seed: int) -> None:
    """Or drafts in their place, where few tokens agree before them."""
    both = WithCopies(start(session.options), seed)
    for moment in moments(session, both, LateDevice(both).draft):  # type: ignore[arg-type]
        assert moment.late == list(map(filled, moment.drafted, moment.texts))


def test_copies_are_kept_and_replaced() -> None:
    """What the sessions above have to show."""
    texts = [[1, 2, 3, 4, 5, 1, 2], [2, 6, 5, 2, 6, 1], [3, 4, 3, 4, 3]]
    steps = [[[3, 4], [5, 1, 6], [2, 6], [1, 6, 2], [6, 1]] * 4] * 3
    session = Session({"in_corpus": True}, list(map(Request, texts, steps)))
    both = WithCopies(start(session.options), 1)
    for moment in moments(session, both, LateDevice(both).draft):  # type: ignore[arg-type]
        assert moment.late == list(map(filled, moment.drafted, moment.texts))
    assert both.num_kept > 5
    assert both.num_replaced > 5
