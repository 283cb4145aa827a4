# SPDX-License-Identifier: Apache-2.0
"""Branches over KV blocks: the request's own ones first, scratch blocks behind; without vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.models import Branch

if TYPE_CHECKING:
    import torch

Int32s = NDArray[np.int32]
LogitRow = tuple["torch.Tensor", int]
"""A tensor of logits and the row that is meant."""


class Scratch:
    """The scratch blocks of one model; all are free again when a step's drafting ends."""

    def __init__(self, blocks: Sequence[int]) -> None:
        """Start with all of them free."""
        self._blocks = list(blocks)
        self._num_used = 0
        self.most_used = 0

    def take(self, number: int) -> list[int] | None:
        """That many blocks; None if there are not so many left."""
        end = self._num_used + number
        if end > len(self._blocks):
            return None
        taken = self._blocks[self._num_used : end]
        self._num_used = end
        self.most_used = max(self.most_used, end)
        return taken

    def free_all(self) -> None:
        """The step is over."""
        self._num_used = 0


@dataclass(eq=False)
class PagedBranch(Branch):
    """A :class:`Branch` with its blocks and logits."""

    request_id: str = ""
    own: Int32s = field(default_factory=lambda: np.empty(0, np.int32))  # the request's blocks
    num_own: int = 0  # columns of the block table that are own blocks
    extra: list[int] = field(default_factory=list)  # scratch blocks of the columns behind
    floor: int = 0  # tokens that are not this branch's to take back
    start: int = 0  # tokens before the last pass
    before: LogitRow | None = None  # behind the tokens before the last pass
    rows: LogitRow | None = None  # first row of the last pass; one a token from `start` on
    last: LogitRow | None = None  # behind the last token
    outputs: list[int] = field(default_factory=list)
    """EAGLE: which of the model's outputs in this step belong to its last tokens; the next token is
    read with the last one."""

    def block(self, column: int) -> int:
        """The block of a column."""
        if column < self.num_own:
            return int(self.own[column])
        return self.extra[column - self.num_own]

    @property
    def num_columns(self) -> int:
        """Columns that have a block."""
        return self.num_own + len(self.extra)

    def reserve(self, length: int, block_size: int, scratch: Scratch) -> bool:
        """Have blocks for this many tokens; False if there are not enough."""
        missing = -(-length // block_size) - self.num_columns
        if missing <= 0:
            return True
        taken = scratch.take(missing)
        if taken is None:
            return False
        self.extra += taken
        return True

    def forked(self, block_size: int, scratch: Scratch) -> "tuple[PagedBranch, int | None] | None":
        """One more branch with these tokens; None if there is no room.

        Returns:
            The branch, and the block whose contents must be copied to its last block, if any.
        """
        shared, rest = divmod(self.length, block_size)
        extra = self.extra[: max(0, shared - self.num_own)]
        source = None
        if rest:
            taken = scratch.take(1)
            if taken is None:
                return None
            source = self.block(shared)
            extra = extra + taken
        twin = PagedBranch(
            request=self.request,
            length=self.length,
            is_trunk=False,
            request_id=self.request_id,
            own=self.own,
            num_own=min(shared, self.num_own),
            extra=extra,
            floor=self.length,
            start=self.length,
            before=self.last,
            last=self.last,
            outputs=list(self.outputs),
        )
        return twin, source

    def take_back(self, length: int) -> None:
        """Go back to fewer tokens; keeps the logits where the last pass gave them."""
        if length == self.length:
            return
        if self.rows is not None and length > self.start:
            self.last = (self.rows[0], self.rows[1] + length - 1 - self.start)
        else:
            self.last = self.before if length == self.start else None
        if length < self.start:
            self.before = self.rows = None
        del self.outputs[max(0, len(self.outputs) - (self.length - length)) :]
        self.length = length
