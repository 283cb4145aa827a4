# SPDX-License-Identifier: Apache-2.0
"""A round over a view and its passes as plain arrays: what a rank needs to run them, and no more.

Reads and writes part here: attention reads what the view's table shows, and a token's KV goes to
the slot of its true position, in the request's own blocks or in a spill block behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class RoundPlan:
    """What each request of a round sees, until the round ends.

    Arrays of `p` are about the requests of which pages are hidden.
    """

    tables: Int32s  # [n, width] all blocks of each request, spill blocks included
    view_tables: Int32s  # [n, view_width] what is in sight; places of chosen pages hold zeros
    partial: Int64s  # [p] which of the n these are
    recent_starts: Int64s  # [p] page
    places: Int64s  # [p] where each rank keeps the request's choice of pages
    new_pages: Int64s  # [m] blocks whose means are not known yet


@dataclass(frozen=True)
class ViewPass:
    """Rows of all requests that take part, one after the other."""

    ids: Int64s  # [num_rows] token ids
    positions: Int64s  # [num_rows] true ones
    slots: Int64s  # [num_rows] where the KV of each row goes: block * block_size + offset
    members: Int64s  # [k] which requests of the round take part
    query_lens: Int32s  # [k]
    view_lens: Int32s  # [k] tokens in sight, with the rows of the pass
    full_lens: Int32s  # [k] all tokens, with the rows of the pass
    choosing: Int64s  # [c] which of the k choose their pages in this pass, by their first row
    begins: RoundPlan | None = None  # the round begins with this pass

    @property
    def num_rows(self) -> int:
        """Tokens of the pass."""
        return len(self.ids)


def lay_out_pass(
    plan: RoundPlan,
    starts: Sequence[int],
    tokens: Sequence[Sequence[int]],
    hidden: Sequence[int],
    block_size: int,
    choosing: Sequence[bool],
) -> ViewPass:
    """A pass over the next tokens of a round.

    Args:
        plan: Of the round, of n requests.
        starts: [n] position of the first token of each.
        tokens: [n] what each reads; none: it sits this pass out.
        hidden: [n] tokens of each that are not in sight.
        block_size: Tokens a block.
        choosing: [n] whether each chooses its pages, if it takes part.
    """
    lengths = np.array([len(some) for some in tokens], np.int64)
    members = np.flatnonzero(lengths)
    query_lens = lengths[members]
    part_of = np.repeat(np.arange(len(members)), query_lens)
    offsets = np.arange(len(part_of)) - (np.cumsum(query_lens) - query_lens)[part_of]
    positions = np.asarray(starts, np.int64)[members][part_of] + offsets
    blocks = plan.tables[members[part_of], positions // block_size].astype(np.int64)
    ends = np.asarray(starts, np.int64)[members] + query_lens
    return ViewPass(
        ids=np.array([token for some in tokens for token in some], np.int64),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        members=members,
        query_lens=query_lens.astype(np.int32),
        view_lens=(ends - np.asarray(hidden, np.int64)[members]).astype(np.int32),
        full_lens=ends.astype(np.int32),
        choosing=np.flatnonzero(np.asarray(choosing, np.bool_)[members]),
    )
