# SPDX-License-Identifier: Apache-2.0
"""One view of the target's cache with its books: who sees what, who chooses pages; without vLLM."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vllm_spec_ext.engine.models.forward_times import ForwardTimes
from vllm_spec_ext.engine.models.hosted_model import Counts
from vllm_spec_ext.engine.views.page_layout import PageBudget, PartialSight, view_tables
from vllm_spec_ext.engine.views.view_books import Int32s, ViewBooks
from vllm_spec_ext.engine.views.view_pass import RoundPlan, lay_out_pass
from vllm_spec_ext.proposers.records import RequestStep
from vllm_spec_ext.proposers.views import ReadFacts, ViewSpec

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.engine.views.view_pass import ViewPass


class ViewRunner(Protocol):
    """Computes what :class:`HostedView` decides, on all ranks."""

    def run_view(self, index: int, plan: "ViewPass") -> "torch.Tensor":
        """Write the KV of all rows; [num_rows, vocab] logits.

        Args:
            index: Of the view.
            plan: The pass; its tables are those of the last round that began.
        """


@dataclass
class _Choice:
    """Of one request: the pages that each rank keeps for it."""

    place: int  # where
    recent_start: int = 0  # page; what was recent then stays in sight until the next choice
    age: int = -1  # rounds since; -1 = never chosen


@dataclass
class _Member:
    """Of a round."""

    table: Int32s
    root: int  # the last certain token, which the target has not read
    room: int
    sight: PartialSight | None
    choice: _Choice | None
    is_choosing: bool  # until its first pass
    floor: int  # position of the root
    cursor: int  # position that it reads next
    num_read: int = 0  # in the last pass


class HostedView:
    """Implements :class:`vllm_spec_ext.proposers.views.TargetView`."""

    reads: ReadFacts

    def __init__(
        self, spec: ViewSpec, index: int, runner: ViewRunner, books: ViewBooks, max_num_seqs: int
    ) -> None:
        """Without KV.

        Args:
            spec: What it shows.
            index: Of the view.
            runner: Its passes.
            books: What it shares with the other views.
            max_num_seqs: Most requests that run at once.
        """
        self.spec = spec
        self.counts = Counts()
        self._index = index
        self._runner = runner
        self._books = books
        self._times = ForwardTimes()
        self._choices: dict[str, _Choice] = {}
        self._free_places = list(range(max_num_seqs))[::-1]

    # -- the engine's side ------------------------------------------------------------------------

    @cached_property
    def budget(self) -> PageBudget:
        """In pages, whose size is known once there is KV."""
        return PageBudget.of(self.spec, self._books.block_size)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone, or go on with other tokens."""
        for request_id in request_ids:
            choice = self._choices.pop(request_id, None)
            if choice is not None:
                self._free_places.append(choice.place)

    # -- the proposer's side ----------------------------------------------------------------------

    def seen(self, length: int) -> int:
        """See :meth:`vllm_spec_ext.proposers.views.TargetView.seen`."""
        return self.budget.seen(length, self._books.block_size)

    def forward_seconds(self, num_rows: int) -> float | None:
        """See :meth:`vllm_spec_ext.proposers.views.TargetView.forward_seconds`."""
        return self._times.estimate(num_rows)

    def begin(self, requests: Sequence[RequestStep], rows: Sequence[int]) -> "PagedRound":
        """See :meth:`vllm_spec_ext.proposers.views.TargetView.begin`."""
        size = self._books.block_size
        taking_part: list[int] = []
        members: list[_Member] = []
        for index in rows:
            request = requests[index]
            length = len(request.token_ids)
            table = self._books.table(request.request_id, length + max(0, request.room))
            if table is None or len(table) * size < length:
                continue  # not even the root has a place
            room = min(request.room, len(table) * size - length)
            sight = self.budget.sight((length - 1) // size)
            choice = self._choice(request.request_id, sight)
            is_choosing = False
            if choice is not None and sight is not None:
                choice.age += choice.age >= 0
                growth = sight.recent_start - choice.recent_start
                is_kept = 0 <= choice.age < self.spec.refresh and growth <= self.budget.most_growth
                is_choosing = not is_kept
                if is_kept:
                    sight = replace(sight, recent_start=choice.recent_start)
            root = int(request.token_ids[-1])
            taking_part.append(index)
            members.append(
                _Member(table, root, room, sight, choice, is_choosing, length - 1, length - 1)
            )
        self._books.round_number += 1
        return PagedRound(self, taking_part, members, self._plan(members))

    # -- inside -----------------------------------------------------------------------------------

    def _choice(self, request_id: str, sight: PartialSight | None) -> _Choice | None:
        """The books of a request that chooses pages."""
        if self.spec.kind != "retrieval" or sight is None:
            return None
        if request_id not in self._choices:
            self._choices[request_id] = _Choice(self._free_places.pop())
        return self._choices[request_id]

    def _plan(self, members: Sequence[_Member]) -> RoundPlan:
        widths = [len(member.table) for member in members]
        tables = np.zeros((len(members), max(widths, default=0)), np.int32)
        for row, member in enumerate(members):
            tables[row, : widths[row]] = member.table
        partial = [row for row, member in enumerate(members) if member.sight is not None]
        needed = [
            member.table[member.sight.num_sink : member.sight.recent_start]
            for member in members
            if member.is_choosing and member.sight is not None
        ]
        pages = np.concatenate(needed) if needed else np.empty(0, np.int32)
        return RoundPlan(
            tables,
            view_tables(tables, widths, [member.sight for member in members]),
            np.array(partial, np.int64),
            np.array([_start(members[row]) for row in partial], np.int64),
            np.array([_place(members[row]) for row in partial], np.int64),
            self._books.known.unknown(pages),
        )

    def _run(self, plan: "ViewPass") -> "torch.Tensor":
        started = time.perf_counter()
        try:
            logits = self._runner.run_view(self._index, plan)
        except BaseException:
            self._books.known.clear()  # some of it may not have been made
            self.forget(list(self._choices))
            raise
        seconds = time.perf_counter() - started
        if plan.begins is not None:
            self._books.known.learn(plan.begins.new_pages)
        if plan.begins is None or not len(plan.begins.new_pages):
            # Making means is work for a prompt, once; it says nothing about passes to come.
            self._times.observe(plan.num_rows, seconds)
        self.counts.forwards += 1
        self.counts.rows += plan.num_rows
        self.counts.seconds += seconds
        return logits.float()


class PagedRound:
    """Implements :class:`vllm_spec_ext.proposers.views.ViewRound`."""

    def __init__(
        self, view: HostedView, rows: Sequence[int], members: Sequence[_Member], plan: RoundPlan
    ) -> None:
        """Begin; :meth:`HostedView.begin` does it.

        Args:
            view: Whose round it is.
            rows: Indices of the members in the step.
            members: Requests that take part.
            plan: What they see.
        """
        self.rows = list(rows)
        self.rooms = [member.room for member in members]
        self._view = view
        self._members = list(members)
        self._plan = plan
        self._number = view._books.round_number
        self._has_begun = False

    def run(self, tokens: Sequence[Sequence[int]]) -> "torch.Tensor":
        """See :meth:`vllm_spec_ext.proposers.views.ViewRound.run`."""
        import torch

        self._check(tokens)
        for member, some in zip(self._members, tokens, strict=True):
            member.num_read = len(some)
        if not any(len(some) for some in tokens):
            return torch.empty(0, 0)
        size = self._view._books.block_size
        plan = lay_out_pass(
            self._plan,
            [member.cursor for member in self._members],
            tokens,
            [0 if m.sight is None else m.sight.num_hidden * size for m in self._members],
            size,
            [member.is_choosing for member in self._members],
        )
        if not self._has_begun:
            plan = replace(plan, begins=self._plan)
        logits = self._view._run(plan)
        self._has_begun = True
        for member in self._members:
            member.cursor += member.num_read
            if member.num_read and member.is_choosing:
                assert member.choice is not None
                member.is_choosing = False
                member.choice.age, member.choice.recent_start = 0, _start(member)
        return logits

    def keep(self, counts: Sequence[int]) -> None:
        """See :meth:`vllm_spec_ext.proposers.views.ViewRound.keep`."""
        self._must_go_on()
        for member, count in zip(self._members, counts, strict=True):
            if not 0 <= count <= member.num_read:
                raise ValueError(
                    f"view {self._view.spec.name}: cannot keep {count} tokens of a pass that read "
                    f"{member.num_read}"
                )
        for member, count in zip(self._members, counts, strict=True):
            member.cursor -= member.num_read - count
            member.num_read = count

    def _check(self, tokens: Sequence[Sequence[int]]) -> None:
        self._must_go_on()
        for member, some in zip(self._members, tokens, strict=True):
            if not len(some):
                continue
            if member.cursor == member.floor and int(some[0]) != member.root:
                raise ValueError(
                    f"view {self._view.spec.name}: found token {int(some[0])}, expected the "
                    f"request's last certain one, {member.root}, as the first one of a round"
                )
            end = member.cursor + len(some) - 1 - member.floor
            if end > member.room:
                raise ValueError(
                    f"view {self._view.spec.name}: found {end} drafted tokens, expected at most "
                    f"{member.room}"
                )

    def _must_go_on(self) -> None:
        if self._number != self._view._books.round_number:
            raise ValueError(
                f"view {self._view.spec.name}: this round is over; expected the round that began "
                "last, in the step in which it began"
            )


def _start(member: _Member) -> int:
    return 0 if member.sight is None else member.sight.recent_start


def _place(member: _Member) -> int:
    return 0 if member.choice is None else member.choice.place
