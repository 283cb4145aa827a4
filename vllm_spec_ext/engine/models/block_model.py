# SPDX-License-Identifier: Apache-2.0
"""One block drafter with its books: which of its context's KV is there; without vLLM.

Its KV of position i is made of the target's hidden state of token i, so it exists as soon as the
target has read that token, and that state is there in that step alone. So all rows of all requests
are written, drafts or not; a request that lacks some gets no drafts. Where nothing is drafted the
states of some steps wait, and their KV is made at once, before anybody drafts or blocks change
hands: a pass over few rows takes as long as one over many. The rows of a
block lie behind the context and are never kept: the next step writes the context there.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vllm_spec_ext.engine.models.block_pass import (
    Block,
    BlockPass,
    ContextRows,
    lay_out_blocks,
    lay_out_context,
)
from vllm_spec_ext.engine.models.branches import PagedBranch, Scratch
from vllm_spec_ext.engine.models.filled_blocks import FilledBlocks
from vllm_spec_ext.engine.models.forward_pass import Part
from vllm_spec_ext.engine.models.forward_times import ForwardTimes
from vllm_spec_ext.engine.models.hosted_model import LOST, BatchRow, Counts
from vllm_spec_ext.proposers.models import BlockFacts, BlockWeights, SlotCandidates, SlotHint
from vllm_spec_ext.proposers.records import RequestStep

if TYPE_CHECKING:
    import torch


class BlockOutput(NamedTuple):
    """Candidates of the slots that wanted some."""

    tokens: "torch.Tensor"  # [n, m] int64, the likeliest by the slot alone first
    log_probs: "torch.Tensor"  # [n, p, m] float32, see SlotCandidates


class BlockRunner(Protocol):
    """Computes what :class:`BlockModel` decides."""

    def write_context(self, plan: ContextRows, wait: bool = False) -> None:
        """Make KV of the target's states, or keep them until the next ones that do not wait."""

    def run_blocks(self, plan: BlockPass) -> BlockOutput:
        """Candidates of each wanted row."""

    def exchange(self, number: int, weights: BlockWeights) -> None:
        """Other weights, known by a number."""


@dataclass(frozen=True)
class BlockSettings:
    """What the engine knows of a checkpoint; the rest is its proposer's business."""

    facts: BlockFacts
    mask_id: int
    causal: bool  # rows of a block see those before them only
    num_ids: int  # its vocabulary


_MOST_WAITING = 256  # rows; a model of 7B has 40 kB of states for each


class BlockModel:
    """Implements :class:`vllm_spec_ext.proposers.models.BlockDrafter`."""

    def __init__(
        self,
        name: str,
        runner: BlockRunner,
        settings: BlockSettings,
        max_model_len: int,
        *,
        may_wait: bool,
    ) -> None:
        """Without KV; :meth:`bind` gives it some.

        Args:
            name: Of the model.
            runner: Its passes.
            settings: Of its checkpoint.
            max_model_len: Most tokens of a request with its draft.
            may_wait: States of several steps may wait; not with other ranks, which have to be told
                and listen after a step only.
        """
        self.name = name
        self.facts = settings.facts
        self.max_model_len = max_model_len
        self.counts = Counts()
        self.prompt_seconds = 0.0
        """Of the current step: what the context of unfinished prompts took."""
        self._runner = runner
        self._settings = settings
        self._times = ForwardTimes()
        self._known: dict[str, int] = {}  # leading positions that are there; they stay
        self._rows: Mapping[str, BatchRow] = {}
        self._is_written = False
        self._may_wait = may_wait
        self._num_waiting = 0  # rows

    # -- the engine's side ------------------------------------------------------------------------

    def bind(self, num_blocks: int, block_size: int, scratch: Sequence[int]) -> None:
        """Use these KV blocks from now on.

        Args:
            num_blocks: Of the requests.
            block_size: Tokens a block.
            scratch: Ids of blocks for what lies behind a request's own.
        """
        self._block_size = block_size
        self.blocks = FilledBlocks(num_blocks, block_size)
        self.scratch = Scratch(scratch)
        self._known.clear()

    def warm_up(self) -> None:
        """Predict behind no text, so that no request waits for what is compiled at first use.

        The runner's states may be any. Two sizes, as what is compiled for one is made for its
        number of rows alone.
        """
        for num_slots in (1, self.facts.num_slots):
            branch = PagedBranch(request=-1, length=0, is_trunk=True)
            if branch.reserve(1 + num_slots, self._block_size, self.scratch):
                plan = self._lay_out([Block(branch, 0, 0, 0, num_slots, num_slots)], 1)
                self._runner.run_blocks(plan)
            self.scratch.free_all()

    def settle(self) -> None:
        """Blocks are about to change hands: write what waits."""
        if self._num_waiting:
            nothing = np.empty(0, np.int64)
            self._write(ContextRows(nothing, nothing, nothing))

    def begin_step(self, rows: Sequence[BatchRow]) -> None:
        """The target ran these rows."""
        # A request that found blocks in the prefix cache comes behind one that fills these in the
        # same step: that one has computed less.
        ordered = sorted(rows, key=lambda row: row.computed)
        self._rows = {row.request_id: row for row in ordered}
        self._is_written = False
        self.prompt_seconds = 0.0

    def end_step(self, could_draft: bool) -> None:
        """Drafting is over: write the context if nothing was drafted, and free what lay behind."""
        can_wait = self._may_wait and self._num_waiting < _MOST_WAITING
        try:
            self._write_context(
                wait=can_wait and not any(row.is_prefill for row in self._rows.values())
            )
        finally:
            self.scratch.free_all()
            self._rows = {}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone, or whose blocks are."""
        for request_id in request_ids:
            self._known.pop(request_id, None)

    # -- the proposer's side ----------------------------------------------------------------------

    def predict(
        self,
        requests: Sequence[RequestStep],
        rows: Sequence[int],
        num_slots: int,
        num_candidates: int,
        hints: Sequence[SlotHint | None] | None = None,
    ) -> list[SlotCandidates | None]:
        """See :meth:`vllm_spec_ext.proposers.models.BlockDrafter.predict`."""
        self._write_context()
        blocks: dict[int, Block] = {}
        for place, index in enumerate(rows):
            hint = None if hints is None else hints[place]
            block = self._block(requests[index], num_slots, hint)
            if block is not None:
                blocks[place] = block
        result: list[SlotCandidates | None] = [None] * len(rows)
        if not blocks:
            return result
        plan = self._lay_out(list(blocks.values()), num_candidates)
        started = time.perf_counter()
        made = self._runner.run_blocks(plan)
        # Waits for the device: drafts are scheduled from host memory.
        tokens, log_probs = made.tokens.int().cpu().numpy(), made.log_probs.float().cpu().numpy()
        seconds = time.perf_counter() - started
        self._times.observe(plan.rows.num_rows, seconds)
        self._count(1, plan.rows.num_rows, seconds)
        first = 0
        for place, block in blocks.items():
            end = first + block.num_wanted
            result[place] = SlotCandidates(tokens[first:end], log_probs[first:end])
            first = end
        return result

    def forward_seconds(self, num_rows: int) -> float | None:
        """See :meth:`vllm_spec_ext.proposers.models.BlockDrafter.forward_seconds`."""
        return self._times.estimate(num_rows)

    def exchange(self, weights: BlockWeights) -> None:
        """See :meth:`vllm_spec_ext.proposers.models.BlockDrafter.exchange`.

        The books stay: the KV that is there, and the states that wait, are of the target.
        """
        self._runner.exchange(weights.number, weights)

    # -- inside -----------------------------------------------------------------------------------

    def _lay_out(self, blocks: Sequence[Block], num_candidates: int) -> BlockPass:
        own = self._settings
        sizes = (self._block_size, own.num_ids)
        return lay_out_blocks(blocks, *sizes, own.mask_id, num_candidates, own.causal)

    def _write_context(self, wait: bool = False) -> None:
        """KV of everything that the target read in this step, and of what waits."""
        if self._is_written:
            return
        self._is_written = True
        parts, num_prompt_rows = [], 0
        for row in self._rows.values():
            part = self._context_part(row)
            if part is not None:
                parts.append(part)
                num_prompt_rows += len(part.tokens) if row.is_prefill else 0
        if not parts:
            if not wait:
                self.settle()
            return
        plan = lay_out_context(parts, self._block_size)
        seconds = self._write(plan, wait)
        self.prompt_seconds += seconds * num_prompt_rows / len(plan.positions)

    def _write(self, plan: ContextRows, wait: bool = False) -> float:
        """Seconds that it took."""
        started = time.perf_counter()
        self._num_waiting = self._num_waiting + len(plan.positions) if wait else 0
        try:
            self._runner.write_context(plan, wait)
        except BaseException as error:
            self._num_waiting = 0
            self.blocks.take_back()
            self._known.clear()  # what was known may have been expected
            error.add_note(LOST)
            raise
        if not wait:
            self.blocks.confirm()
        seconds = time.perf_counter() - started
        self._count(0, len(plan.positions), seconds)
        return seconds

    def _context_part(self, row: BatchRow) -> Part | None:
        """What to write of a request; marks it as filled. None: nothing, or it has a gap."""
        assert row.state_rows is not None
        room = min(len(row.blocks) * self._block_size, self.max_model_len)
        end = min(row.computed + len(row.state_rows), room)
        if row.num_ids is not None:
            # It is drafted nothing; what stands in front of a picture may be in other prompts.
            end = min(end, row.num_ids)
        start = self._filled(row, end)
        if start >= end or start < row.computed:
            return None
        self.blocks.expect(row.blocks, start, end)
        self._known[row.request_id] = end
        own = len(row.blocks)
        branch = PagedBranch(-1, end, True, own=row.blocks, num_own=own)
        states = row.state_rows[start - row.computed : end - row.computed]
        return Part(branch, start, np.zeros(end - start, np.int32), 0, states)

    def _filled(self, row: BatchRow, limit: int) -> int:
        """Leading positions whose KV is there, at most so many."""
        known = min(self._known.get(row.request_id, 0), limit)
        return self.blocks.leading(row.blocks, limit, known)

    def _block(self, request: RequestStep, num_slots: int, hint: SlotHint | None) -> Block | None:
        """The block behind a request's tokens; None if it cannot be drafted for."""
        row = self._rows.get(request.request_id)
        length = len(request.token_ids)
        slots = min(num_slots, self.facts.num_slots, self.max_model_len - length)
        wanted = min(slots, request.room)
        if row is None or not row.has_ids or wanted < 1:
            return None
        if self._filled(row, length - 1) < length - 1:
            return None
        branch = PagedBranch(
            request=-1,
            length=length - 1,
            is_trunk=True,
            request_id=request.request_id,
            own=row.blocks,
            num_own=len(row.blocks),
        )
        if not branch.reserve(length + slots, self._block_size, self.scratch):
            return None
        assert row.state_rows is not None
        return Block(
            branch,
            start=length - 1,
            token=int(request.token_ids[-1]),
            state=int(row.state_rows[length - 2 - row.computed]),
            num_slots=slots,
            num_wanted=wanted,
            hint=hint,
        )

    def _count(self, forwards: int, rows: int, seconds: float) -> None:
        self.counts.forwards += forwards
        self.counts.rows += rows
        self.counts.seconds += seconds
