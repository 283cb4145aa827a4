# SPDX-License-Identifier: Apache-2.0
"""One draft model with its books: which KV is there, which branches live; without vLLM.

Per request it keeps how many leading positions are known to be filled, and the *tail*: drafted
tokens that the trunk read, whose KV lies in the request's own blocks behind its certain tokens.
The next :meth:`HostedModel.sync` compares the tail with what the request's tokens have become. That
one rule covers accepted drafts, rejected ones, accepted branches, drafts that were cut, and a bonus
token that was guessed; nobody has to report what was accepted.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.engine.models.branches import Int32s, LogitRow, PagedBranch, Scratch
from vllm_spec_ext.engine.models.filled_blocks import FilledBlocks
from vllm_spec_ext.engine.models.forward_pass import ForwardPass, Part, lay_out
from vllm_spec_ext.engine.models.forward_times import ForwardTimes
from vllm_spec_ext.engine.views.page_layout import PageBudget
from vllm_spec_ext.proposers.models import Branch
from vllm_spec_ext.proposers.records import RequestStep
from vllm_spec_ext.proposers.views import ViewSpec

if TYPE_CHECKING:
    import torch


class PassRunner(Protocol):
    """Computes what :class:`HostedModel` decides."""

    def forward(self, plan: ForwardPass) -> "torch.Tensor":
        """Write the KV of all rows; logits [len(plan.wanted), own vocabulary]."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks of this model, (from, to); no block is on both sides."""

    def reload(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Other weights, by their names in the checkpoint."""


@dataclass(frozen=True)
class BatchRow:
    """One request of the batch that the target has just run."""

    request_id: str
    blocks: Int32s  # [n] its own KV blocks
    tokens: NDArray[np.int32]  # certain ones that its blocks are meant for; of an unfinished
    # prompt those up to the end of this step's chunk, else all, the bonus token too
    is_prefill: bool  # it got no token in this step
    num_ids: int | None = None  # leading tokens that have ids, of a prompt with others (embeddings,
    # pictures); None: all do
    computed: int = 0  # tokens whose KV the target had before the step
    following: NDArray[np.int32] | None = None  # the token behind each one that the target has read
    state_rows: NDArray[np.int64] | None = None  # EAGLE: of the tokens from `computed` on, the rows
    # of the target's step that have their hidden states

    @property
    def has_ids(self) -> bool:
        """Whether all its tokens do."""
        return self.num_ids is None


@dataclass
class _Known:
    """Of one request."""

    filled: int = 0  # leading positions that are filled; what a request owns stays filled
    tail_start: int = 0
    tail: list[int] = field(default_factory=list)


@dataclass
class Counts:
    """What a model did since the engine started."""

    forwards: int = 0
    rows: int = 0
    seconds: float = 0.0


LOST = "What this pass was to read of the target cannot be had again: texts with it get no drafts."


class HostedModel:
    """Implements :class:`vllm_spec_ext.proposers.models.DraftModel`."""

    _loses_what_failed = False
    """Whether the input of a pass that failed is gone."""

    def __init__(
        self,
        name: str,
        runner: PassRunner,
        *,
        num_ids: int,
        vocab_size: int,
        max_model_len: int,
        max_rows: int,
        view: ViewSpec | None = None,
    ) -> None:
        """Without KV; :meth:`bind` gives it some.

        Args:
            name: Of the model.
            runner: Its forward passes.
            num_ids: Its own vocabulary.
            vocab_size: The target's.
            max_model_len: Most tokens it can read.
            max_rows: Most rows of a pass that brings requests up to date.
            view: What it sees of its KV; None = all.
        """
        self.name = name
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.counts = Counts()
        self.is_drafting = True
        """Whether the proposer used it when it last could; prompts are read along only then."""
        self.prompt_seconds = 0.0
        """Of the current step: what reading unfinished prompts took."""
        self.blocks = FilledBlocks(0, 1)  # until :meth:`bind`
        self._runner = runner
        self._num_ids = num_ids
        self._max_rows = max_rows
        self._view = view
        self._times = ForwardTimes()
        self._known: dict[str, _Known] = {}
        self._rows: Mapping[str, BatchRow] = {}
        self._unread: list[BatchRow] = []  # prompts of the step that were not read yet
        self._trunks: dict[str, PagedBranch] = {}
        self._forks: list[PagedBranch] = []
        self._was_synced = False

    # -- the engine's side ------------------------------------------------------------------------

    def bind(self, num_blocks: int, block_size: int, scratch: Sequence[int]) -> None:
        """Use these KV blocks from now on.

        Args:
            num_blocks: Of the requests.
            block_size: Tokens a block.
            scratch: Ids of blocks for branches.
        """
        self._block_size = block_size
        self._budget = None if self._view is None else PageBudget.of(self._view, block_size)
        self.blocks = FilledBlocks(num_blocks, block_size)
        self.scratch = Scratch(scratch)
        self._known.clear()

    def begin_step(self, rows: Sequence[BatchRow]) -> None:
        """The target ran these rows."""
        self._rows = {row.request_id: row for row in rows}
        self._unread = [row for row in rows if row.is_prefill and row.has_ids]
        self._was_synced = False
        self.prompt_seconds = 0.0

    def end_step(self, could_draft: bool) -> None:
        """Drafting is over: read what prompts are left, and free all branches.

        Args:
            could_draft: Whether any request had room for a draft.
        """
        if could_draft:
            self.is_drafting = self._was_synced
        try:
            if self.is_drafting and self._unread:
                parts = self._prompt_parts(self._max_rows)
                self._read(parts, sum(len(part.tokens) for part in parts))
        finally:
            for branch in [*self._trunks.values(), *self._forks]:
                branch.alive = False  # its blocks are free
            self._trunks.clear()
            self._forks.clear()
            self.scratch.free_all()
            self._rows, self._unread = {}, []

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone, or whose blocks are."""
        for request_id in request_ids:
            self._known.pop(request_id, None)

    def reload(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Run with other weights from now on, and forget all KV of the old ones.

        Args:
            weights: Names as in the checkpoint, and tensors; those not named stay.
        """
        self._runner.reload(weights)
        self.blocks.clear()
        self._known.clear()

    # -- the proposer's side ----------------------------------------------------------------------

    def sync(
        self,
        requests: Sequence[RequestStep],
        rows: Sequence[int],
        suffixes: Sequence[Sequence[int]] | None = None,
    ) -> list[Branch | None]:
        """See :meth:`vllm_spec_ext.proposers.models.DraftModel.sync`."""
        self._was_synced = True
        read = [
            self._trunk(index, requests[index], () if suffixes is None else suffixes[place])
            for place, index in enumerate(rows)
        ]
        parts: dict[int, Part] = {}
        left = self._max_rows
        lengths = [0 if found is None else found[0].length - found[1] for found in read]
        # The least behind first: they can draft, while others may need several steps.
        for place in sorted(range(len(read)), key=lengths.__getitem__):
            found = read[place]
            if found is None:
                continue
            part = self._trunk_part(*found, left)
            if part is None:
                continue
            parts[place] = part
            left -= len(part.tokens) - max(0, part.num_wanted - 1)  # suffixes are not counted
        prompts = self._prompt_parts(left)
        num_prompt_rows = sum(len(part.tokens) for part in prompts)
        first_rows = self._read([*parts.values(), *prompts], num_prompt_rows)
        result: list[Branch | None] = [None] * len(rows)
        for (place, part), row in zip(parts.items(), first_rows, strict=False):
            found = read[place]
            assert found is not None
            trunk, _, suffix = found
            if not part.num_wanted:  # it takes several steps to catch up
                continue
            self._settle(trunk, suffix, row)
            self._trunks[trunk.request_id] = trunk
            result[place] = trunk
        return result

    def extend(self, branches: Sequence[Branch], tokens: Sequence[Sequence[int]]) -> None:
        """See :meth:`vllm_spec_ext.proposers.models.DraftModel.extend`."""
        parts = []
        for branch, more in zip(branches, tokens, strict=True):
            assert isinstance(branch, PagedBranch)
            if not branch.alive:
                continue
            if not len(more):
                raise ValueError(f"{self.name}: extend() needs at least one token for each branch")
            end = branch.length + len(more)
            if end > self.max_model_len or not branch.reserve(end, self._block_size, self.scratch):
                branch.alive = False
                branch.before = branch.rows = branch.last = None
                continue
            given = np.asarray(more, np.int32)
            parts.append(Part(branch, branch.length, given, len(given)))
        for part, row in zip(parts, self._read(parts), strict=True):
            branch = part.branch
            branch.before, branch.start = branch.last, branch.length
            branch.length += len(part.tokens)
            branch.rows = row
            branch.last = (row[0], row[1] + len(part.tokens) - 1)
            if branch.is_trunk:
                self._note_tail(branch, part.start, part.tokens.tolist())

    def fork(self, branches: Sequence[Branch]) -> list[Branch | None]:
        """See :meth:`vllm_spec_ext.proposers.models.DraftModel.fork`."""
        made: list[Branch | None] = []
        copies = []
        for branch in branches:
            assert isinstance(branch, PagedBranch)
            found = branch.forked(self._block_size, self.scratch) if branch.alive else None
            if found is None:
                made.append(None)
                continue
            twin, source = found
            if source is not None:
                copies.append((source, twin.extra[-1]))
            self._forks.append(twin)
            made.append(twin)
        if copies:
            self._runner.copy_blocks(copies)
        return made

    def rewind(self, branch: Branch, length: int) -> None:
        """See :meth:`vllm_spec_ext.proposers.models.DraftModel.rewind`."""
        assert isinstance(branch, PagedBranch)
        if not branch.floor <= length <= branch.length:
            raise ValueError(
                f"{self.name}: cannot rewind a branch of {branch.length} tokens to {length}; "
                f"expected {branch.floor} to {branch.length}"
            )
        branch.take_back(length)
        if branch.is_trunk:
            known = self._known.setdefault(branch.request_id, _Known())
            del known.tail[max(0, length - known.tail_start) :]

    def logits(self, branches: Sequence[Branch]) -> "torch.Tensor":
        """See :meth:`vllm_spec_ext.proposers.models.DraftModel.logits`."""
        rows = []
        for branch in branches:
            assert isinstance(branch, PagedBranch)
            if branch.last is None:
                state = "was rewound" if branch.alive else "found no room"
                raise ValueError(f"{self.name}: a branch has no logits, as it {state}")
            rows.append(branch.last)
        return self._gather(rows)

    def all_logits(self, branch: Branch) -> "torch.Tensor":
        """See :meth:`vllm_spec_ext.proposers.models.DraftModel.all_logits`."""
        assert isinstance(branch, PagedBranch)
        if branch.before is None:
            raise ValueError(f"{self.name}: a branch has no logits of its last pass any more")
        rows = [branch.before]
        if branch.rows is not None:
            tensor, first = branch.rows
            rows += [(tensor, first + i) for i in range(branch.length - branch.start - 1)]
        # Cut afterwards, so that no rows at all are on the model's device, too.
        return self._gather(rows)[: branch.length - branch.start]

    def read_logits(self, branch: Branch) -> "torch.Tensor":
        """See :meth:`vllm_spec_ext.proposers.models.DraftModel.read_logits`."""
        assert isinstance(branch, PagedBranch)
        if branch.rows is None:
            raise ValueError(f"{self.name}: a branch has no logits of its last pass any more")
        tensor, first = branch.rows
        return self._gather([(tensor, first + i) for i in range(branch.length - branch.start)])

    def forward_seconds(self, num_rows: int) -> float | None:
        """See :meth:`vllm_spec_ext.proposers.models.DraftModel.forward_seconds`."""
        return self._times.estimate(num_rows)

    # -- inside -----------------------------------------------------------------------------------

    def _trunk(
        self, index: int, request: RequestStep, suffix: Sequence[int]
    ) -> "tuple[PagedBranch, int, Int32s] | None":
        """A trunk that is not read yet, the first position to read, and its suffix."""
        row = self._rows.get(request.request_id)
        length = len(request.token_ids)
        if row is None or not row.has_ids or length + len(suffix) > self.max_model_len:
            return None
        old = self._trunks.pop(request.request_id, None)
        if old is not None:  # two trunks would write to the same places
            old.alive = False
        filled = self._recognise(row)
        start = min(filled, length - 1)  # one at least, for its logits
        trunk = PagedBranch(
            request=index,
            length=length,
            is_trunk=True,
            request_id=request.request_id,
            own=row.blocks,
            num_own=len(row.blocks),
            floor=length,
        )
        return trunk, start, np.asarray(suffix, np.int32)

    def _trunk_part(self, trunk: PagedBranch, start: int, suffix: Int32s, left: int) -> Part | None:
        """What to read of a trunk with so many rows left; marks as filled what it reads."""
        row = self._rows[trunk.request_id]
        # A request that shares blocks may have been laid out before, in this very pass: a layer
        # writes the KV of all rows before any of them attends.
        start = max(start, self._recognise(row))
        start = min(start, trunk.length - 1)
        if trunk.length - start > left:
            return self._prompt_part(row, left)
        tokens = np.concatenate([row.tokens[start:], suffix])
        if not trunk.reserve(start + len(tokens), self._block_size, self.scratch):
            return None
        self._fill(row, start, trunk.length)
        return Part(trunk, start, tokens, len(suffix) + 1)

    def _prompt_parts(self, left: int) -> list[Part]:
        """What to read of unfinished prompts."""
        parts = []
        if self.is_drafting or self._was_synced:
            for row in self._unread:
                part = self._prompt_part(row, left)
                if part is not None:
                    parts.append(part)
                    left -= len(part.tokens)
            self._unread = []
        return parts

    def _prompt_part(self, row: BatchRow, left: int) -> Part | None:
        """The next tokens of a request, without logits; marks them as filled."""
        start = self._recognise(row)
        room = min(len(row.tokens), self.max_model_len, len(row.blocks) * self._block_size)
        end = min(room, start + left)
        if end <= start:
            return None
        self._fill(row, start, end)
        own = len(row.blocks)
        branch = PagedBranch(-1, end, True, own=row.blocks, num_own=own)
        return Part(branch, start, row.tokens[start:end], 0)

    def _recognise(self, row: BatchRow) -> int:
        """Leading positions of a request that are filled; what became of its tail is seen here."""
        known = self._known.setdefault(row.request_id, _Known())
        limit = min(len(row.tokens), len(row.blocks) * self._block_size)
        filled = self.blocks.leading(row.blocks, limit, known.filled)
        if known.tail:
            came = row.tokens[known.tail_start : known.tail_start + len(known.tail)]
            same = np.asarray(known.tail[: len(came)], np.int32) == came
            num_right = len(same) if same.all() else int(same.argmin())
            end = min(known.tail_start + num_right, limit)
            if known.tail_start <= filled < end:
                self.blocks.fill(row.blocks, filled, end)
                filled = end
            known.tail = []
        known.filled = filled
        return filled

    def _fill(self, row: BatchRow, start: int, end: int) -> None:
        """Mark as filled what is about to be read; only what lies in the request's own blocks."""
        end = min(end, len(row.blocks) * self._block_size)
        self.blocks.expect(row.blocks, start, end)
        known = self._known[row.request_id]
        known.filled = max(known.filled, end)

    def _settle(self, trunk: PagedBranch, suffix: Int32s, row: LogitRow) -> None:
        """A trunk was read: where its logits are, and its tail."""
        tensor, first = row
        trunk.before, trunk.start = row, trunk.length
        trunk.rows = (tensor, first + 1) if len(suffix) else None
        trunk.last = (tensor, first + len(suffix))
        trunk.length += len(suffix)
        known = self._known[trunk.request_id]
        known.tail_start, known.tail = trunk.start, []
        self._note_tail(trunk, trunk.start, suffix.tolist())

    def _note_tail(self, trunk: PagedBranch, start: int, tokens: Sequence[int]) -> None:
        """Remember drafted tokens of a trunk as far as they lie in the request's own blocks."""
        known = self._known.setdefault(trunk.request_id, _Known())
        if start == known.tail_start + len(known.tail):
            known.tail += tokens[: max(0, trunk.num_own * self._block_size - start)]

    def _read(self, parts: Sequence[Part], num_prompt_rows: int = 0) -> list[LogitRow]:
        """One pass over all parts; the first wanted row of logits of each.

        Args:
            parts: May be none.
            num_prompt_rows: How many of their rows are of unfinished prompts.
        """
        if not parts:
            return []
        try:
            plan = self._plan(parts)
            started = time.perf_counter()
            logits = self._runner.forward(plan)
        except BaseException as error:
            self.blocks.take_back()
            self._known.clear()  # what was known may have been expected
            if self._loses_what_failed:
                error.add_note(LOST)
            raise
        self.blocks.confirm()
        seconds = time.perf_counter() - started
        if len(plan.wanted):  # else a GPU may still be at it
            self._times.observe(plan.num_rows, seconds)
        self.prompt_seconds += seconds * self._share(num_prompt_rows, plan.num_rows)
        self.counts.forwards += 1
        self.counts.rows += plan.num_rows
        self.counts.seconds += seconds
        ends = np.cumsum([part.num_wanted for part in parts])
        return [(logits, int(end) - part.num_wanted) for part, end in zip(parts, ends, strict=True)]

    def _plan(self, parts: Sequence[Part]) -> ForwardPass:
        return lay_out(parts, self._block_size, self._num_ids, self._budget)

    def _share(self, num_some: int, num_rows: int) -> float:
        """The part of a pass that some of its rows are to blame for."""
        if num_some in (0, num_rows):
            return float(num_some > 0)
        whole, rest = self._times.estimate(num_rows), self._times.estimate(num_rows - num_some)
        return 0.0 if not whole or rest is None else max(0.0, 1.0 - rest / whole)

    def _gather(self, rows: Sequence[LogitRow]) -> "torch.Tensor":
        """[len(rows), target's vocabulary] float32."""
        import torch

        tensors = {id(tensor): tensor for tensor, _ in rows}
        if len(tensors) == 1:
            (tensor,) = tensors.values()
            wanted = [row for _, row in rows]
            first, end = wanted[0], wanted[-1] + 1
            # A level of chains wants all rows of its pass as they are, a review some that follow
            # each other; copying takes longer than choosing among them.
            is_run = wanted == list(range(first, end))
            found = tensor[first:end] if is_run else tensor[wanted]
        elif not rows:
            return torch.empty(0, self.vocab_size)
        else:
            found = torch.stack([tensor[row] for tensor, row in rows])
        found = found[:, : self.vocab_size].float()
        missing = self.vocab_size - found.shape[1]
        if missing:
            found = torch.nn.functional.pad(found, (0, missing), value=float("-inf"))
        return found
