# SPDX-License-Identifier: Apache-2.0
"""Passes over views against their definition, on a toy of paged attention.

Requests come and go as on the engine: prefix hits, preemption, aborts, sessions, rejected drafts.
Every row of logits that a proposer could see is compared. Negative controls take out one part of
the bookkeeping each.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from paged_toy import VOCAB, ToyRequest, ToyScheduler
from toy_simulation import BLOCK, BLOCKS, PREFIXES, SCRATCH
from view_toy import DenseViews, ToyTarget

from vllm_spec_ext.engine.models.batch_events import BlockEvents
from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.engine.views import layer_tables
from vllm_spec_ext.engine.views.known_pages import KnownPages
from vllm_spec_ext.engine.views.page_choice import choose_pages
from vllm_spec_ext.engine.views.page_layout import PageBudget, PartialSight, view_tables
from vllm_spec_ext.engine.views.page_means import columns_of_keys, rows_of_keys
from vllm_spec_ext.engine.views.target_view import HostedView
from vllm_spec_ext.engine.views.view_books import ViewBooks
from vllm_spec_ext.engine.views.view_pass import RoundPlan
from vllm_spec_ext.proposers.records import RequestStep
from vllm_spec_ext.proposers.views import ViewSpec

SPECS = {
    "full": ViewSpec("full", "full"),
    "stream": ViewSpec("stream", "stream", budget=12, sink=4),
    "no_sink": ViewSpec("no_sink", "stream", budget=8, sink=0),
    "retrieval": ViewSpec("retrieval", "retrieval", budget=12, sink=4, recent=4),
    "seldom": ViewSpec("seldom", "retrieval", budget=12, sink=4, recent=4, refresh=4),
    "once": ViewSpec("once", "retrieval", budget=12, sink=4, recent=4, refresh=1000),
    "dense": ViewSpec("dense", "retrieval", budget=8, sink=0, recent=4, dense_layers=(0,)),
}


class ViewSimulation:
    """One view of a toy target, used in every way."""

    def __init__(self, spec: ViewSpec, seed: int, scratch: int = SCRATCH) -> None:
        self.rng = random.Random(seed)
        self.scheduler = ToyScheduler(BLOCKS, BLOCK, 24, self.rng)
        self.target = ToyTarget(seed, [spec], 400)
        self.books = ViewBooks()
        self.books.bind(BLOCKS, BLOCK, range(BLOCKS, BLOCKS + scratch))
        self.view = HostedView(spec, 0, self.target, self.books, 400)
        self.dense = DenseViews(self.target, spec)
        self.rows = self.wrong = self.num_cut = self.num_left_out = 0

    def run(self, num_steps: int) -> "ViewSimulation":
        for number in range(num_steps):
            while len(self.scheduler.waiting) < 2:
                prompt = list(self.rng.choice(PREFIXES))[: self.rng.randint(5, 20)]
                prompt += [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 6))]
                name = f"{number}-{len(self.scheduler.waiting)}"
                length = self.rng.randint(2, 25)
                self.scheduler.waiting.append(ToyRequest(name, prompt, len(prompt), length))
            self._step()
        return self

    def truth(self, tokens: Sequence[int]) -> int:
        return (tokens[-1] + (3 if hash(tuple(tokens)) % 4 else 5)) % VOCAB

    def update(self, events: BlockEvents) -> None:
        self.view.forget(events.gone)
        self.books.update(events)
        self.dense.forget(events.gone)

    def _step(self) -> None:
        step = self.scheduler.step(self.truth)
        self.update(step.events)
        self.target.run_step(step.rows)
        self.books.begin_step(step.rows)
        requests = [
            RequestStep(r.name, np.array(r.tokens, np.int32), r.num_prompt, r.tokens[-n:], 5)
            for r, n in zip(step.decoded, step.new_tokens, strict=True)
        ]
        for _ in range(self.rng.randint(0, 2)):
            rows = [row for row in range(len(requests)) if self.rng.random() < 0.9]
            for row, tokens in self._round(requests, rows).items():
                step.decoded[row].draft = tokens
        self.books.end_step()
        ended = BlockEvents()
        self.scheduler.end(ended)
        self.update(ended)

    def _round(self, requests: Sequence[RequestStep], rows: list[int]) -> dict[int, list[int]]:
        """A round with passes of several tokens, some of which are taken back."""
        round_ = self.view.begin(requests, rows)
        self.num_left_out += len(rows) - len(round_.rows)
        self.num_cut += sum(room < 5 for room in round_.rooms)
        names = [requests[row].request_id for row in round_.rows]
        texts = [requests[row].token_ids.tolist() for row in round_.rows]
        drafts: list[list[int]] = [[] for _ in texts]
        begun = [False] * len(texts)
        for name, text in zip(names, texts, strict=True):
            self.dense.begin(name, text)
        for _ in range(self.rng.randint(1, 3)):
            fed: list[list[int]] = []
            for place, text in enumerate(texts):
                if self.rng.random() < 0.2:
                    fed.append([])
                    continue
                room = round_.rooms[place] - len(drafts[place])
                more = [self.guess([*text, *drafts[place]])]
                more += [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(0, 2))]
                fed.append([*([] if begun[place] else text[-1:]), *more[: max(0, room)]])
            logits = round_.run(fed)
            counts = []
            for place, tokens in enumerate(fed):
                if not tokens:
                    counts.append(0)
                    continue
                expected = self.dense.run(names[place], tokens)
                found, logits = logits[: len(tokens)].numpy(), logits[len(tokens) :]
                same = np.isclose(found, expected, atol=1e-4).all(axis=1)
                self.rows += len(tokens)
                self.wrong += int((~same).sum())
                least = 0 if begun[place] else 1
                counts.append(self.rng.randint(least, len(tokens)))
                self.dense.keep(names[place], len(tokens) - counts[-1])
                drafts[place] += tokens[least : counts[-1]]
                begun[place] = True
            if self.rng.random() < 0.8 or any(
                count < len(tokens) for count, tokens in zip(counts, fed, strict=True)
            ):
                round_.keep(counts)
        return dict(zip(round_.rows, drafts, strict=True))

    def guess(self, text: Sequence[int]) -> int:
        return self.truth(text) if self.rng.random() < 0.7 else self.rng.randrange(VOCAB)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SPECS)
def test_every_row_is_what_the_view_shows(name: str, seed: int) -> None:
    simulation = ViewSimulation(SPECS[name], seed).run(70)
    scheduler = simulation.scheduler
    assert simulation.wrong == 0
    assert simulation.rows > 300
    assert scheduler.num_hits > 30
    assert scheduler.num_preempted > 2
    if name != "full":
        assert simulation.dense.num_partial > 20
    if name == "seldom":
        assert simulation.dense.num_stale > 10
    assert simulation.books._spill.most_used > 0


def test_choices_of_a_batch_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the means that a choice copies take bounded memory, whatever the batch."""
    most = 0

    def watched(queries: Any, means: torch.Tensor, *rest: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, len(means))
        return choose_pages(queries, means, *rest)

    monkeypatch.setattr(layer_tables, "choose_pages", watched)
    assert ViewSimulation(SPECS["retrieval"], 0).run(40).wrong == 0
    assert most > 1
    most = 0
    monkeypatch.setattr(layer_tables, "_MEANS_AT_ONCE", 1, raising=False)
    assert ViewSimulation(SPECS["retrieval"], 0).run(40).wrong == 0
    assert most == 1


def test_full_views_compute_what_the_target_would() -> None:
    """The definition itself: without anything hidden, rows are those of a dense computation."""
    target = ToyTarget(1, [SPECS["full"]])
    views = DenseViews(target, SPECS["full"])
    text = [i % VOCAB for i in range(30)]
    views.begin("a", text)
    found = np.concatenate([views.run("a", text[-1:]), views.run("a", [3, 4])])
    assert np.allclose(found, target.dense([*text, 3, 4])[-3:])


def no_invalidation(patch: pytest.MonkeyPatch) -> None:
    """Means of what blocks held before."""
    patch.setattr(KnownPages, "allocate", lambda self, blocks: None)


def no_forgetting(patch: pytest.MonkeyPatch) -> None:
    """Pages that were chosen before a preemption, or for the turn before."""
    patch.setattr(HostedView, "forget", lambda self, ids: None)


def all_known(patch: pytest.MonkeyPatch) -> None:
    """No means at all."""
    patch.setattr(KnownPages, "unknown", lambda self, blocks: np.empty(0, np.int64))


def tails_are_learned(patch: pytest.MonkeyPatch) -> None:
    """Means made of a block while it is being written; what is in sight stays the same."""
    plan = HostedView._plan

    def early(self: HostedView, members: Any) -> RoundPlan:
        made, books = plan(self, members), self._books
        tails = [member.table[member.floor // books.block_size] for member in members]
        more = books.known.unknown(np.array([tail for tail in tails if tail < BLOCKS], np.int32))
        return replace(made, new_pages=np.union1d(made.new_pages, more))

    patch.setattr(HostedView, "_plan", early)


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        ("retrieval", no_invalidation),
        ("retrieval", all_known),
        ("retrieval", tails_are_learned),
        ("seldom", no_invalidation),
        ("once", no_forgetting),
    ],
)
def test_rows_are_wrong_without(
    name: str, mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert any(ViewSimulation(SPECS[name], seed).run(70).wrong for seed in range(6))


def test_without_spill_blocks_drafts_get_shorter() -> None:
    simulation = ViewSimulation(SPECS["retrieval"], 0, scratch=1).run(60)
    assert simulation.wrong == 0
    assert simulation.num_cut > 0
    assert simulation.num_left_out > 0


def one_view(
    spec: ViewSpec, length: int, room: int = 3
) -> tuple[HostedView, ViewBooks, list[RequestStep]]:
    target, books = ToyTarget(1, [spec]), ViewBooks()
    books.bind(BLOCKS, BLOCK, range(BLOCKS, BLOCKS + SCRATCH))
    tokens = np.arange(length, dtype=np.int32) % VOCAB
    blocks = np.arange(1, 1 + -(-length // BLOCK), dtype=np.int32)
    row = BatchRow("a", blocks, tokens, False)
    target.run_step([row])
    books.begin_step([row])
    view = HostedView(spec, 0, target, books, 4)
    return view, books, [RequestStep("a", tokens, 1, [1], room)]


def test_misuse_is_refused() -> None:
    view, books, requests = one_view(SPECS["stream"], 30)
    root = int(requests[0].token_ids[-1])
    round_ = view.begin(requests, [0])
    with pytest.raises(ValueError, match="expected the request's last certain one"):
        round_.run([[root + 1]])
    with pytest.raises(ValueError, match="found 4 drafted tokens, expected at most 3"):
        round_.run([[root, 1, 2, 3, 4]])
    assert round_.run([[root, 1]]).shape == (2, VOCAB)
    with pytest.raises(ValueError, match="cannot keep 3 tokens of a pass that read 2"):
        round_.keep([3])
    round_.keep([1])
    round_.run([[2, 3]])
    other = view.begin(requests, [0])
    for call in (lambda: round_.run([[1]]), lambda: round_.keep([0])):
        with pytest.raises(ValueError, match="this round is over"):
            call()
    books.end_step()
    with pytest.raises(ValueError, match="this round is over"):
        other.run([[root]])


def test_an_empty_pass_runs_nothing() -> None:
    view, _, requests = one_view(SPECS["retrieval"], 30)
    round_ = view.begin(requests, [0])
    assert round_.run([[]]).shape == (0, 0)
    assert view.counts.forwards == 0
    assert view.begin(requests, []).run([]).shape == (0, 0)


def test_requests_that_cannot_take_part() -> None:
    """A prompt without token ids, and a request that is not of the step."""
    view, books, requests = one_view(SPECS["stream"], 30)
    row = BatchRow("a", np.arange(1, 9, dtype=np.int32), requests[0].token_ids, False, 0)
    books.begin_step([row])
    assert view.begin(requests, [0]).rows == []
    books.begin_step([])
    assert view.begin(requests, [0]).rows == []


def test_a_failed_pass_forgets_what_it_may_not_have_made(monkeypatch: pytest.MonkeyPatch) -> None:
    view, books, requests = one_view(SPECS["retrieval"], 30)
    root = int(requests[0].token_ids[-1])
    view.begin(requests, [0]).run([[root]])
    pages = np.arange(2, 6)
    assert not len(books.known.unknown(pages))
    with monkeypatch.context() as patch:
        patch.setattr(view._runner, "run_view", lambda index, plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            view.begin(requests, [0]).run([[root]])
    assert len(books.known.unknown(pages)) == 4
    assert view._choices == {}
    assert view.begin(requests, [0]).run([[root]]).shape == (1, VOCAB)


def test_counts_and_times() -> None:
    view, _, requests = one_view(SPECS["full"], 30)
    assert view.forward_seconds(1) is None
    for _ in range(2):
        view.begin(requests, [0]).run([[int(requests[0].token_ids[-1]), 1]])
    assert (view.counts.forwards, view.counts.rows) == (2, 4)
    assert (view.forward_seconds(2) or 0.0) > 0.0


def test_making_means_is_not_counted_as_the_time_of_a_pass() -> None:
    view, _, requests = one_view(SPECS["retrieval"], 30)
    root = int(requests[0].token_ids[-1])
    for number, is_timed in enumerate((False, False, True)):  # one timed pass says nothing
        view.begin(requests, [0]).run([[root]])
        assert (view.forward_seconds(1) is not None) == is_timed
        assert view.counts.forwards == number + 1


def test_a_view_that_keeps_its_choice_grows_by_a_page_or_a_quarter() -> None:
    view, books, requests = one_view(SPECS["once"], 60)
    run_view, in_sight = view._runner.run_view, []

    def watched(index: int, plan: Any) -> torch.Tensor:
        in_sight.extend(plan.view_lens.tolist())
        return run_view(index, plan)

    view._runner.run_view = watched  # type: ignore[method-assign]
    tokens = requests[0].token_ids
    for length in range(24, 61):
        blocks = np.arange(1, 1 + -(-length // BLOCK), dtype=np.int32)
        books.begin_step([BatchRow("a", blocks, tokens[:length], False)])
        now = [RequestStep("a", tokens[:length], 1, [1], 0)]
        view.begin(now, [0]).run([[int(tokens[length - 1])]])
    assert max(in_sight) == (3 + 1 + 1) * BLOCK  # the budget, a page more, and the tail
    assert len(set(in_sight)) > BLOCK


def test_places_of_choices_are_used_again() -> None:
    view, _, requests = one_view(SPECS["retrieval"], 30)
    for number in range(9):  # more requests than can run at once
        name = f"r{number}"
        row = BatchRow(name, np.arange(1, 9, dtype=np.int32), requests[0].token_ids, False)
        view._books.begin_step([row])
        step = [RequestStep(name, requests[0].token_ids, 1, [1], 3)]
        assert view.begin(step, [0]).rows == [0]
        view.forget([name])
    assert len(view._free_places) == 4


@pytest.mark.parametrize(
    ("kind", "num_full", "expected"),
    [
        ("stream", 4, None),
        ("stream", 5, PartialSight(1, 0, 2)),
        ("stream", 40, PartialSight(1, 0, 37)),
        ("retrieval", 4, None),
        ("retrieval", 5, PartialSight(1, 1, 3)),
        ("retrieval", 40, PartialSight(1, 1, 38)),
        ("full", 40, None),
    ],
)
def test_what_is_shown(kind: Any, num_full: int, expected: PartialSight | None) -> None:
    budget = PageBudget.of(ViewSpec("a", kind, budget=64, sink=5, recent=17), 16)
    found = budget.sight(num_full)
    assert found == expected
    if found is not None:
        shown = found.num_sink + found.num_chosen + num_full - found.recent_start
        assert shown == budget.num_pages == num_full - found.num_hidden


@pytest.mark.parametrize("kind", ["stream", "retrieval"])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_small_budgets_in_large_blocks_still_show_something(kind: Any, block_size: int) -> None:
    budget = PageBudget.of(ViewSpec("a", kind, budget=32, sink=31, recent=0), block_size)
    assert budget.num_sink == -(-31 // block_size)
    assert budget.num_chosen + budget.num_recent == 1


def test_tokens_that_are_seen() -> None:
    budget = PageBudget.of(ViewSpec("a", "retrieval", budget=64, sink=16, recent=16), 16)
    assert [budget.seen(length, 16) for length in (0, 1, 64, 80, 81, 96, 97)] == [
        *(0, 1, 64, 80),  # 79 tokens of KV are four full pages and a part of one
        *(65, 80, 65),
    ]


def test_tables_of_a_view() -> None:
    tables = np.array([[10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 0, 0, 0, 0]], np.int32)
    found = view_tables(tables, [7, 3], [PartialSight(1, 2, 5), None])
    assert found.tolist() == [[10, 0, 0, 15, 16], [20, 21, 22, 0, 0]]


def test_heads_of_one_group_choose_together() -> None:
    """Two KV heads of two query heads each; every head counts as much, whatever its scale."""
    means = torch.zeros(1, 4, 2, 4)
    for page in range(4):
        means[0, page, :, page] = 1.0
    queries = torch.zeros(1, 4, 4)
    queries[0, 0, 1] = 50.0  # one head shouts for page 1
    queries[0, 1:, 2] = 8.0  # three ask for page 2
    is_candidate = torch.tensor([[True] * 4])
    assert choose_pages(queries, means, is_candidate, 1).tolist() == [[2]]
    assert choose_pages(queries, means, is_candidate, 2).tolist() == [[1, 2]]
    is_candidate[0, 2] = False
    assert choose_pages(queries, means, is_candidate, 1).tolist() == [[1]]


def test_key_layouts() -> None:
    keys = torch.randn(3, 2, 32, 8)
    values = torch.randn(3, 2, 32, 8)
    rows = torch.cat([keys, values], dim=-1)
    columns = torch.cat([keys.transpose(-1, -2).flatten(2), values.flatten(2)], dim=-1)
    ids = torch.tensor([2, 0])
    assert torch.equal(rows_of_keys(rows, ids), keys[ids])
    assert torch.equal(columns_of_keys(columns.view(3, 2, 32, 16), ids), keys[ids])


def test_known_pages() -> None:
    known = KnownPages(8, 4)
    known.learn(np.array([1, 2, 3, 4]))
    known.enter([1, 2, 5], 6)  # the second block is kept in part only
    known.copied([(3, 4)])
    assert known.unknown(np.array([1, 2, 3, 3, 4, 5])).tolist() == [2, 4, 5]
    known.clear()
    assert known.unknown(np.array([1])).tolist() == [1]
