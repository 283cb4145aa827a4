# SPDX-License-Identifier: Apache-2.0
"""What the tap keeps of a toy target, against its definition; each known mistake breaks a test.

The toy says token t + 1 of a text with a probability that names t, so that whatever stands at the
wrong place shows. METHODS of the reference code's mistakes: rows taken one position too late, bonus
tokens taken for errors, one request at a time.
"""

import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vllm_spec_ext.engine.drafting.step_tap import failed_at
from vllm_spec_ext.online import tap as tap_module
from vllm_spec_ext.online.folder import FolderFacts
from vllm_spec_ext.online.heads_student import HeadsStudent
from vllm_spec_ext.online.sample_pool import _is_apart
from vllm_spec_ext.online.tap import Seen, Tap
from vllm_spec_ext.online.target_ends import TargetEnds
from vllm_spec_ext.online.trace import Trace, pack, unpack
from vllm_spec_ext.options import OnlineOptions
from vllm_spec_ext.proposers.blockwise.heads import BlockwiseHeads, HeadsConfig
from vllm_spec_ext.proposers.records import UNSALTED

HIDDEN, VOCAB, LIKELIEST = 4, 97, 3


def text_of(request: int, length: int) -> list[int]:
    return [(request * 31 + place * 7) % VOCAB for place in range(length)]


class Toy:
    """A target that verifies chains of drafts of several requests, and tells the tap."""

    def __init__(self, tap: Tap, num_draft: int = 3, seed: int = 0) -> None:
        self.tap, self.num_draft = tap, num_draft
        self.random = random.Random(seed)
        self.known: dict[str, int] = {}  # tokens so far
        self.drafted: dict[str, int] = {}  # draft tokens of the next step

    def step(self, name: str, accepted: int | None = None) -> None:
        request, before = int(name), self.known.get(name, 5)
        drafted = self.drafted.get(name, 0)
        accepted = self.random.randint(0, drafted) if accepted is None else accepted
        after = before + accepted + 1
        text = np.array(text_of(request, after), np.int32)
        rows = np.arange(before - 1, after - 1)
        tokens = np.stack([text[rows + 1], rows + 1, rows + 2], axis=1) % VOCAB
        probs = np.stack([0.5 + rows * 1e-3, np.full(len(rows), 0.2), 0.1 + 0 * rows], axis=1)
        draft = [1] * drafted
        self.tap.record(
            Seen(
                request_id=name,
                token_ids=text,
                num_new=len(rows),
                top_tokens=tokens.astype(np.int32),
                top_probs=probs.astype(np.float32),
                failed_at=failed_at(draft, None, range(accepted)),
                state=torch.full((HIDDEN,), float(after - 2)),
                num_prompt_tokens=5,
            )
        )
        self.known[name], self.drafted[name] = after, self.num_draft


def recorded(options: dict[str, Any] | None = None, requests: int = 3) -> list[Trace]:
    found: list[Trace] = []
    given = {"folder": "x", "others": 1.0, **(options or {})}
    tap = Tap(OnlineOptions.model_validate(given), found.append)
    toy = Toy(tap)
    for _ in range(30):
        for request in range(requests):
            toy.step(str(request))
    tap.finish([str(request) for request in range(requests)])
    assert tap.num_bytes == 0
    return found


def test_rows_and_states_are_those_of_their_positions() -> None:
    traces = recorded()
    assert len(traces) == 3
    for request, trace in enumerate(traces):
        text = text_of(request, len(trace.token_ids))
        assert trace.token_ids.tolist() == text
        assert trace.rows.tolist() == list(range(4, len(text) - 1))
        np.testing.assert_allclose(trace.top_probs[:, 0], 0.5 + trace.rows * 1e-3, rtol=1e-6)
        assert trace.top_tokens[:, 0].tolist() == [text[row + 1] for row in trace.rows]
        np.testing.assert_allclose(trace.tails, 1.0 - trace.top_probs.sum(1), atol=1e-6)
        assert trace.states[:, 0].tolist() == trace.starts.tolist()


def test_a_bonus_token_is_no_failure() -> None:
    for trace in recorded():
        steps = np.diff(trace.starts)
        failed = trace.failed_at[:-1]
        assert (steps[failed > 0] == failed[failed > 0]).all()
        assert (steps[failed == 0] == 4).all()  # three accepted, and the bonus token
        assert (failed == 0).any()
        assert (failed > 0).any()


@pytest.mark.parametrize(
    ("draft", "parents", "accepted", "expected"),
    [
        ([], None, (), None),
        ([-1, -1], None, (), None),
        ([5, 6, 7], None, (), 1),
        ([5, 6, 7], None, (0,), 2),
        ([5, 6, 7], None, (0, 1, 2), 0),
        ([5, 6, -1], None, (0, 1), 0),  # the placeholder was no draft token
        ([5, 6, 7], [-1, -1, 1], (0,), 0),  # a leaf
        ([5, 6, 7], [-1, -1, 1], (1,), 2),
        ([5, 6, 7], [-1, -1, 1], (1, 2), 0),
        ([5, 6], [-1, -1], (), 1),
    ],
)
def test_where_a_draft_failed(
    draft: list[int], parents: list[int] | None, accepted: Sequence[int], expected: int | None
) -> None:
    assert failed_at(draft, parents, accepted) == expected


def student(options: OnlineOptions, copy_match: int = 0) -> HeadsStudent:
    facts = FolderFacts(
        method="blockwise", target="toy", drafter="x", vocab_size=VOCAB, options=options
    )
    torch.manual_seed(0)
    ends = TargetEnds(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))
    made = HeadsStudent(facts, torch.device("cpu"), ends)
    config = HeadsConfig(
        target="toy",
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        num_heads=3,
        head_width=4,
        condition_on_next=True,
        copy_match=copy_match,
    )
    made.module = BlockwiseHeads(config)
    made._rows, made._bias = ends.rows(None)
    made._places = torch.arange(VOCAB)
    return made


def test_each_draft_token_is_taught_by_the_row_before_it() -> None:
    """Head d drafts token t + 1 + d, which row t + d foretells; one later teaches the next."""
    traces = recorded()
    columns = student(OnlineOptions(folder="x")).columns(traces)
    starts = np.concatenate([trace.starts for trace in traces])
    texts = [trace.token_ids for trace in traces for _ in trace.starts]
    for place, (start, text) in enumerate(zip(starts.tolist(), texts, strict=True)):
        assert columns["following"][place] == text[start + 1]
        for head in range(3):
            row = start + head + 1
            if row + 1 < len(text):
                assert columns["known"][place, head]
                assert columns["places"][place, head, 0] == text[row + 1]
                assert columns["probs"][place, head, 0] == pytest.approx(0.5 + row * 1e-3)
            else:  # past the end of the text: padding teaches nothing
                assert not columns["known"][place, head]


def test_copies_are_those_that_serving_shows() -> None:
    """Of the text up to the next token, and nothing behind it."""
    from vllm_spec_ext.proposers.text_index.copied_tokens import copied_tokens
    from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex

    text = np.array([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1, 2], np.int32)
    rows = np.arange(3, 13, dtype=np.int32)
    trace = Trace(
        token_ids=text,
        rows=rows,
        top_tokens=np.zeros((10, 2), np.int32),
        top_probs=np.full((10, 2), 0.4, np.float32),
        tails=np.full(10, 0.2, np.float32),
        starts=np.array([5, 9, 12], np.int32),
        failed_at=np.zeros(3, np.int32),
        chances=np.ones(3, np.float32),
        states=torch.zeros(3, HIDDEN, dtype=torch.bfloat16),
    )
    columns = student(OnlineOptions(folder="x"), copy_match=4).columns([trace])
    for place, start in enumerate(trace.starts.tolist()):
        index = OccurrenceIndex(20)
        index.append(text[: start + 2])
        expected = copied_tokens(index, 4, 3)
        assert columns["copied"][place].tolist() == expected.tokens.tolist()
        assert columns["copied_length"][place] == expected.length


def test_requests_in_a_batch_teach_what_they_teach_alone() -> None:
    traces = recorded()
    teacher = student(OnlineOptions(folder="x"))
    together = teacher.columns(traces)
    alone = [teacher.columns([trace]) for trace in traces]
    for name, values in together.items():
        assert torch.equal(values, torch.cat([part[name] for part in alone]))


def test_all_of_a_request_is_trained_on_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a long one, which becomes several traces, on disk and back."""
    monkeypatch.setattr(tap_module, "_MAX_ROWS", 16)
    sides: dict[tuple[int, ...], list[bool]] = {}
    for trace in unpack(pack(recorded(requests=40))):
        assert trace.num_prompt_tokens == 5
        sides.setdefault(tuple(trace.token_ids[:5].tolist()), []).append(_is_apart(trace))
    assert len(sides) == 40
    assert all(len(set(found)) == 1 < len(found) for found in sides.values())
    assert {found[0] for found in sides.values()} == {False, True}


def test_failures_are_kept_and_a_share_of_the_rest() -> None:
    (everything,) = recorded(requests=1)
    (some,) = recorded({"others": 0.0}, requests=1)
    failed = everything.failed_at > 0
    assert some.starts.tolist() == everything.starts[failed].tolist()
    assert (some.failed_at > 0).all()
    assert len(some.rows) == len(everything.rows)  # they teach the starts that are kept


def test_seldom_recorded_places_count_for_more() -> None:
    """What is learned from is what was served, however much more often failures are kept."""
    everything = recorded(requests=40)
    some = recorded({"others": 0.25}, requests=40)
    assert sum(len(trace.starts) for trace in some) < sum(len(trace.starts) for trace in everything)
    teacher = student(OnlineOptions(folder="x"))
    shares = []
    for traces in (everything, some):
        weights = teacher.columns(traces)["weights"].numpy()
        failed = np.concatenate([trace.failed_at > 0 for trace in traces])
        shares.append(weights[failed].sum() / weights.sum())
    assert shares[1] == pytest.approx(shares[0], abs=0.03)
    # A weight is a number of places: one that counts four times is four of them.
    (trace,) = recorded(requests=1)
    batch = teacher.columns([trace])
    heavy = {name: values[:2] for name, values in batch.items()}
    heavy["weights"] = torch.tensor([1.0, 4.0])
    places = torch.tensor([0, 1, 1, 1, 1])
    often = {name: values[places] for name, values in batch.items()}
    for one, other in zip(teacher.judge(heavy)[:2], teacher.judge(often)[:2], strict=True):
        torch.testing.assert_close(one, other)


def test_whose_requests_are_recorded() -> None:
    tap = Tap(OnlineOptions(folder="x"), lambda _: None)
    assert tap.wants("1", UNSALTED, True)
    assert not tap.wants("1", UNSALTED, False)
    assert not tap.wants("1", "a salt", True)
    assert not tap.wants("1", None, True)
    everyone = Tap(OnlineOptions(folder="x", record="all"), lambda _: None)
    assert everyone.wants("1", "a salt", True)
    assert everyone.wants("1", None, True)
    assert not everyone.wants("1", "a salt", False)
    half = Tap(OnlineOptions(folder="x", requests=0.5), lambda _: None)
    chosen = [half.wants(str(i), UNSALTED, True) for i in range(1000)]
    assert 400 < sum(chosen) < 600
    assert chosen == [half.wants(str(i), UNSALTED, True) for i in range(1000)]


def test_memory_is_flat_over_many_steps() -> None:
    """Requests without end and one after the other; nothing takes what was recorded away."""
    limit_mb = 0.25
    waiting = 0

    def write(trace: Trace) -> None:
        nonlocal waiting
        waiting += trace.num_bytes

    tap = Tap(OnlineOptions(folder="x", others=1.0, buffer_mb=limit_mb), write)
    tap.bytes_elsewhere = lambda: waiting
    seen: dict[str, int] = {}
    draws, peak = random.Random(0), 0
    row = np.zeros((2, 16), np.int32), np.full((2, 16), 0.05, np.float32)
    state = torch.zeros(64)
    for step in range(100_000):
        name = str(step % 7 if step % 3 else step)  # some are there once and leave no word
        known = seen.get(name, 8)
        tap.record(Seen(name, np.zeros(known + 2, np.int32), 2, *row, failed_at=1, state=state))
        seen[name] = known + 2 if known < 2000 else 8
        if known >= 2000 or step % 3 == 0:
            tap.finish([name])
            seen.pop(name, None)
        if step == 50_000:
            waiting = 0  # the disk is back
        if draws.random() < 0.001:
            peak = max(peak, tap.num_bytes + waiting)
    assert peak < 1.2 * limit_mb * 2**20
    assert tap.num_dropped > 1000
    assert len(tap.open_requests) <= 7


def test_what_is_counted_is_what_is_kept() -> None:
    """Of a step of many requests only the rows of those that are recorded, and ids as 4 bytes."""
    tap = Tap(OnlineOptions(folder="x"), lambda _: None)
    prompt = np.zeros(8002, np.int32)
    tracemalloc.start()
    try:
        for index in range(20):
            tap.record(Seen(f"long {index}", prompt, 2, *rows_of_step(2)))
        for step in range(200):
            tokens, probs = rows_of_step(64)
            text = np.zeros(10 + step, np.int32)
            tap.record(Seen("one of many", text, 1, tokens[:1], probs[:1]))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1.5 * tap.num_bytes


def rows_of_step(count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return np.zeros((count, 16), np.int32), np.zeros((count, 16), np.float32)


def test_a_long_text_becomes_several_traces() -> None:
    found: list[Trace] = []
    toy = Toy(Tap(OnlineOptions(folder="x", others=1.0), found.append))
    for _ in range(300):
        toy.step("0")
    toy.tap.finish(["0"])
    assert len(found) > 2
    rows = np.concatenate([trace.rows for trace in found])
    assert rows.tolist() == list(range(4, toy.known["0"] - 1))
    starts = np.concatenate([trace.starts for trace in found])
    assert len(starts) == 299  # the last draft was never verified
    for trace in found:
        assert trace.token_ids.tolist() == text_of(0, len(trace.token_ids))
        assert trace.states[:, 0].tolist() == pytest.approx(trace.starts.tolist(), rel=0.01)


def test_text_that_changed_begins_a_new_trace() -> None:
    found: list[Trace] = []
    tap = Tap(OnlineOptions(folder="x", others=1.0), found.append)
    toy = Toy(tap)
    for _ in range(3):
        toy.step("0")
    toy.known["0"] += 5  # steps that the tap did not see
    for _ in range(3):
        toy.step("0")
    tap.finish(["0"])
    assert len(found) == 2
    for trace in found:
        np.testing.assert_allclose(trace.top_probs[:, 0], 0.5 + trace.rows * 1e-3, rtol=1e-6)


def test_shards_hold_what_was_put_in() -> None:
    traces = recorded()
    back = unpack(pack(traces))
    for one, other in zip(traces, back, strict=True):
        for name in ("token_ids", "rows", "top_tokens", "top_probs", "tails", "starts"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert np.array_equal(one.failed_at, other.failed_at)
        assert torch.equal(one.states, other.states)
