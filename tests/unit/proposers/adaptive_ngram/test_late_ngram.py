# SPDX-License-Identifier: Apache-2.0
"""``adaptive_ngram`` one step late: which rows are copied, what is drafted, and when it is not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late_ngram_sessions import ENGINE, K, Request, Session, moments, start, step_of
from numpy.typing import NDArray

from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram, late_ngram
from vllm_spec_ext.proposers.adaptive_ngram.changed_rows import WORDS, ChangedRows
from vllm_spec_ext.proposers.adaptive_ngram.options import AdaptiveNgramOptions
from vllm_spec_ext.proposers.adaptive_ngram.overlay import LAST_GENERATION, OverlayPool, learn
from vllm_spec_ext.proposers.base import StepContext, chain

V = 12


class Copy:
    """A copy of two pools, kept by their changed rows."""

    def __init__(self) -> None:
        self.pools = [OverlayPool(2, 4), OverlayPool(3, 2)]
        self.changed = ChangedRows(self.pools)
        self.rows = np.zeros((self.changed.num_rows, WORDS), np.int64)

    def learn(self, number: int, slot: int, tokens: list[int], start: int) -> None:
        pool, text = self.pools[number], np.array(tokens, np.int32)
        learn(pool.arrays, slot, text, start, V, True, 10.0, 1.0, 3.0)
        self.changed.learned(pool, slot, text, start, V)

    def take(self) -> int:
        packed = self.changed.take()
        assert len(np.unique(packed[:, 0])) == len(packed), "a row goes once"
        self.rows[packed[:, 0]] = packed[:, 1:]
        return len(packed)

    def check(self) -> None:
        """Every row is that of its pool."""
        for pool, first in zip(self.pools, self.changed.first_rows, strict=True):
            arrays = pool.arrays
            num = arrays.keys.size
            ours = self.rows[first : first + num]
            assert (ours[:, 0] == arrays.keys.reshape(num).view(np.int64)).all()
            assert (ours[:, 1] == arrays.stamps.reshape(num)).all()
            assert (_words(ours[:, 2:6]) == arrays.tokens.reshape(num, 8)).all()
            weights = _words(ours[:, 6:10]).view(np.float32)
            assert (weights == arrays.weights.reshape(num, 8)).all()


def _words(longs: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.ascontiguousarray(longs).view(np.int32)


# One pool and overlay, and what it learns; or no tokens: the overlay is emptied; or None: a copy.
EVENT = st.none() | st.tuples(
    st.integers(0, 1), st.integers(0, 1), st.lists(st.integers(0, V + 1), max_size=30)
)


@settings(max_examples=200)
@given(st.lists(EVENT, max_size=12))
def test_changed_rows_are_all_that_a_copy_needs(events: list[Any]) -> None:
    copy = Copy()
    for pool in copy.pools:
        for _ in range(2):
            pool.acquire()
    for event in events:
        if event is None:
            copy.take()
            copy.check()
        elif event[2]:
            copy.learn(event[0], event[1], event[2], len(event[2]) // 3)
        else:
            copy.pools[event[0]].clear(event[1])
    copy.take()
    copy.check()
    assert copy.take() == 0


def test_what_is_there_from_the_start_is_copied_too() -> None:
    """As an overlay that was read from a file."""
    copy = Copy()
    copy.pools[1].acquire()
    learn(copy.pools[1].arrays, 0, np.arange(5, dtype=np.int32), 0, V, True, 10.0, 1.0, 3.0)
    copy.changed = ChangedRows(copy.pools)
    assert copy.take() == copy.pools[1].rows_used(0) > 3
    copy.check()


def test_rows_that_did_not_arrive_are_taken_again() -> None:
    copy = Copy()
    for number, pool in enumerate(copy.pools):
        pool.acquire()
        copy.learn(number, 0, [*range(5 + number)], 0)
    lost = copy.changed.take()
    assert len(lost) > 6
    assert len(copy.changed.take()) == 0
    copy.changed.give_back(lost[:, 0])
    copy.learn(0, 0, [7, 8, 9], 0)
    assert copy.take() > len(lost)
    copy.check()


def test_where_generations_begin_again_old_rows_go() -> None:
    copy = Copy()
    pool = copy.pools[0]
    slot = pool.acquire()
    assert slot is not None
    copy.learn(0, slot, [1, 2, 3], 0)
    assert copy.changed.begin(pool, slot) == (slot * 16, 1, 2)
    copy.take()
    pool.arrays.generations[slot] = LAST_GENERATION
    copy.changed.begin(pool, slot)
    pool.clear(slot)
    assert copy.changed.begin(pool, slot) == (slot * 16, 1, 0)
    assert copy.take() == 16
    copy.check()


def late(options: dict[str, Any]) -> AdaptiveNgram:
    proposer = start(options)
    proposer.drafter.is_late = True  # no device: what it would draft is of interest
    return proposer


SESSION = Session(
    {},
    [
        Request([1, 2, 3, 4, 5, 1, 2], [[3, 4], [5, 1, 6], [2, 6], [1, 6, 2], [6, 1]]),
        Request([2, 6, 5, 2, 6], [[5], [2, 6, 4], [5, 2, 6, 4]], begins=1),
    ],
)


@pytest.mark.parametrize("overlay", ["request", "both", "shared"])
def test_late_it_drafts_from_what_it_knew_behind_all_tokens(overlay: str) -> None:
    """As another one that has learned no more, and is asked to go on from there."""
    proposer, other = late({"overlay": overlay}), start({"overlay": overlay})
    compared: list[list[int]] = []
    read: list[Any] = []

    def draft(known: list[Any], texts: list[list[int]]) -> list[list[int]]:
        proposer.drafter.learn_known(known)
        other.propose(StepContext(known))
        found = []
        for one, text in zip(known, texts, strict=True):
            new = text[len(one.token_ids) :]
            found.append(other.continue_from(one.request_id, new, K).tolist())
            read.append(replace(one, token_ids=np.array(text, np.int32), new_tokens=new))
        return found

    for moment in moments(SESSION, proposer, draft):
        assert moment.drafted == moment.late
        compared += moment.drafted
        other.propose(StepContext(read))
        read.clear()
    assert sum(map(bool, compared)) > 3


def test_what_became_of_late_drafts_may_be_told() -> None:
    """Outcomes are of the drafts that a device made, which may be longer than those made now."""
    proposer = late({})
    request = Request([1, 2, 3, 4, 5, 6, 1, 2], [])
    proposer.drafter.learn_known([step_of("r", request, request.prompt, [])])
    text = [*request.prompt, 3]
    [draft] = proposer.propose(StepContext([step_of("r", request, text, [3])]))
    assert draft.tokens.tolist() == [4, 5, 6, 1, 2, 3][: len(draft)]
    text += [4, 5, 0]
    [draft] = proposer.propose(StepContext([step_of("r", request, text, [4, 5, 0])]))
    assert draft.tokens.tolist() == chain([]).tokens.tolist(), "0 was never followed yet"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, 'its drafts are trees; "tree": false drafts chains'),
        ({"own_text": True}, "its drafts are trees"),
        ({"preset": "aded_reference"}, "its drafts are trees"),
        ({"tree": False, "request_buckets": 1 << 16}, "its tables take 60 MiB, expected at most 9"),
        ({"tree": False}, None),
    ],
)
def test_why_it_waits(
    options: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("vllm_spec_ext.proposers.adaptive_ngram.MOST_LATE_BYTES", 9 << 20)
    proposer = AdaptiveNgram(AdaptiveNgramOptions(**options))
    proposer.start(ENGINE)
    made = proposer.late_drafter(ENGINE)
    assert isinstance(made, str) == (reason is not None)
    assert reason is None or str(made).startswith(reason)


def test_its_tables_take_their_memory_when_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before vLLM measures what is left for requests, and only where it does draft late."""
    pytest.importorskip("triton")
    import torch

    taken: list[int] = []
    zeros = torch.zeros

    def counted(*args: Any, **kwargs: Any) -> Any:
        made = zeros(*args, **kwargs)
        taken.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "zeros", counted)
    proposer = start({"tree": False})
    late = proposer.late_drafter(ENGINE)
    assert not isinstance(late, str)
    assert not taken
    late.start(torch.device("cpu"))
    learner, base = proposer.drafter.learner, proposer.drafter.base
    corpus = sum(array.nbytes for array in base)
    assert taken == [late_ngram.table_bytes(learner, base) - corpus]
    assert proposer.drafter.is_late


def test_it_drafts_as_ever_where_the_engine_asks_for_no_late_drafts() -> None:
    """Which it does if tensor parallelism or a relaxed rule keeps it from them."""
    pytest.importorskip("triton")
    options = {"tree": False}
    able, plain = start(options), start(options)
    assert not isinstance(able.late_drafter(ENGINE), str)
    request = Request([1, 2, 3, 4, 5, 6, 1, 2], [])
    step = StepContext([step_of("r", request, [*request.prompt, 3], [3])])
    [draft], [expected] = able.propose(step), plain.propose(step)
    assert draft.tokens.tolist() == expected.tokens.tolist()
    assert len(draft) > 1
