# SPDX-License-Identifier: Apache-2.0
"""One forward pass over paged KV as plain arrays: what a rank needs to run it, and no more."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.engine.models.branches import PagedBranch
from vllm_spec_ext.engine.views.page_layout import PageBudget, view_tables

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Tokens of one branch in a pass."""

    branch: PagedBranch  # with blocks for all of them
    start: int  # position of the first
    tokens: Int32s
    num_wanted: int  # the last so many get logits
    states: Int64s | None = None  # EAGLE: see ForwardPass; None = the branch's last output


@dataclass(frozen=True)
class ForwardPass:
    """Rows of all parts, one after the other; to attention each part is a request of its own."""

    ids: Int64s  # [num_rows] token ids
    positions: Int64s  # [num_rows]
    slots: Int64s  # [num_rows] where the KV of each row goes: block * block_size + offset
    query_lens: Int32s  # [num_parts]
    seq_lens: Int32s  # [num_parts] tokens in sight, with the rows of the pass
    tables: Int32s  # [num_parts, width] blocks in sight of each part
    wanted: Int64s  # rows whose logits are wanted, ascending
    states: Int64s | None = None
    """EAGLE: [num_rows] the hidden state that each row is read with. ``s >= 0`` is row s of the
    target's step, ``~s`` the model's own output number s since that step."""

    @property
    def num_rows(self) -> int:
        """Tokens of the pass."""
        return len(self.ids)


def lay_out(
    parts: Sequence[Part], block_size: int, num_ids: int, budget: PageBudget | None = None
) -> ForwardPass:
    """Put parts into one pass.

    Args:
        parts: At least one.
        block_size: Tokens a block.
        num_ids: Size of the model's vocabulary; higher ids are read as its last one.
        budget: What each part sees of the tokens before it; None = all.
    """
    query_lens = np.array([len(part.tokens) for part in parts], np.int32)
    starts = np.array([part.start for part in parts], np.int64)
    seq_lens = (starts + query_lens).astype(np.int32)
    tables = np.zeros((len(parts), int(-(-seq_lens.max() // block_size))), np.int32)
    for row, part in enumerate(parts):
        branch, num_columns = part.branch, -(-int(seq_lens[row]) // block_size)
        num_own = min(branch.num_own, num_columns)
        tables[row, :num_own] = branch.own[:num_own]
        if num_columns > num_own:
            tables[row, num_own:num_columns] = branch.extra[: num_columns - num_own]
    part_of = np.repeat(np.arange(len(parts)), query_lens)
    first_rows = np.cumsum(query_lens) - query_lens
    offsets = np.arange(len(part_of)) - first_rows[part_of]
    positions = starts[part_of] + offsets
    slots = tables[part_of, positions // block_size].astype(np.int64) * block_size
    num_wanted = np.array([part.num_wanted for part in parts], np.int64)
    ids = np.concatenate([part.tokens for part in parts]).astype(np.int64)
    if budget is not None:
        sights = [budget.sight(part.start // block_size) for part in parts]
        tables = view_tables(tables, (-(-seq_lens // block_size)).tolist(), sights)
        hidden = [0 if sight is None else sight.num_hidden for sight in sights]
        seq_lens = seq_lens - np.array(hidden, np.int32) * block_size
    return ForwardPass(
        ids=np.clip(ids, 0, num_ids - 1),
        positions=positions,
        slots=slots + positions % block_size,
        query_lens=query_lens,
        seq_lens=seq_lens,
        tables=tables,
        wanted=np.flatnonzero(offsets >= (query_lens - num_wanted)[part_of]),
    )
