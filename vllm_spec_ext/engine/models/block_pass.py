# SPDX-License-Identifier: Apache-2.0
"""What a block drafter computes in a step as plain arrays: its context, and its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.engine.models.branches import PagedBranch
from vllm_spec_ext.engine.models.forward_pass import ForwardPass, Int64s, Part, lay_out
from vllm_spec_ext.proposers.models import SlotHint


@dataclass(frozen=True)
class ContextRows:
    """Tokens that the target has read: their hidden states become the drafter's KV."""

    states: Int64s  # [n] rows of the target's step
    positions: Int64s  # [n]
    slots: Int64s  # [n] where the KV goes: block * block_size + offset


@dataclass(frozen=True)
class Block:
    """The block of one request: its last token, and masks behind it."""

    branch: PagedBranch  # with KV blocks for all rows
    start: int  # position of the last token
    token: int
    state: int  # row of the target's step that has the token in front of it
    num_slots: int  # masks
    num_wanted: int  # the first so many slots get candidates
    hint: SlotHint | None = None


@dataclass(frozen=True)
class BlockPass:
    """Blocks of several requests.

    Every row is a request of its own to attention: one token, behind which lie the KV of all rows
    that it sees. So rows of a block see each other on any backend, though metadata say "causal".
    """

    rows: ForwardPass  # its `wanted` are the rows of slots that get candidates
    slot_numbers: Int64s  # [num_rows] from 0; -1 = the row of the last token
    shown: Int64s  # [num_rows] token that a slot is shown; any where there is none
    kinds: Int64s  # [num_rows] of what it is shown; 0 = nothing
    blocks: Int64s  # [num_rows] number of the block
    tokens: Int64s  # [num_blocks] last token of the request
    states: Int64s  # [num_blocks] row of the target's step that has the token in front of it
    num_candidates: int

    @property
    def last_tokens(self) -> Int64s:
        """[len(wanted)] last token of the request."""
        return self.tokens[self.blocks[self.rows.wanted]]

    def first_hints(self, count: int) -> tuple[Int64s, Int64s]:
        """What the first slots of each block are shown.

        Args:
            count: Of slots.

        Returns:
            [num_blocks, count] tokens, zeros where there is no slot; [num_blocks] their kind.
        """
        tokens = np.zeros((len(self.tokens), count), np.int64)
        rows = np.flatnonzero((self.slot_numbers >= 0) & (self.slot_numbers < count))
        tokens[self.blocks[rows], self.slot_numbers[rows]] = self.shown[rows]
        return tokens, self.kinds[self.slot_numbers == 0]


def lay_out_context(parts: Sequence[Part], block_size: int) -> ContextRows:
    """Rows of requests whose states become KV.

    Args:
        parts: At least one; `states` are given, tokens do not matter.
        block_size: Tokens a block.
    """
    plan = lay_out(parts, block_size, 1)
    states = [part.states for part in parts if part.states is not None]
    return ContextRows(np.concatenate(states), plan.positions, plan.slots)


def lay_out_blocks(
    blocks: Sequence[Block],
    block_size: int,
    num_ids: int,
    mask_id: int,
    num_candidates: int,
    causal: bool,
) -> BlockPass:
    """Put blocks into one pass.

    Args:
        blocks: At least one.
        block_size: Tokens a KV block.
        num_ids: Size of the drafter's vocabulary; higher ids are read as its last one.
        mask_id: Token of the mask.
        num_candidates: Of each slot.
        causal: Rows see those before them only.
    """
    parts = []
    for block in blocks:
        tokens = np.full(1 + block.num_slots, mask_id, np.int32)
        tokens[0] = block.token
        parts.append(Part(block.branch, block.start, tokens, 0))
    whole = lay_out(parts, block_size, num_ids)
    lengths = whole.query_lens.astype(np.int64)
    numbers = np.concatenate([np.arange(-1, block.num_slots, dtype=np.int64) for block in blocks])
    limits = np.repeat(np.array([block.num_wanted for block in blocks], np.int64), lengths)
    is_wanted = (numbers >= 0) & (numbers < limits)
    ends = whole.positions + 1 if causal else np.repeat(whole.seq_lens, lengths)
    rows = replace(
        whole,
        query_lens=np.ones(len(numbers), np.int32),
        seq_lens=ends.astype(np.int32),
        tables=np.repeat(whole.tables, lengths, axis=0),
        wanted=np.flatnonzero(is_wanted),
    )
    shown, kinds = _hints(blocks, num_ids)
    return BlockPass(
        rows,
        numbers,
        shown,
        kinds,
        blocks=np.repeat(np.arange(len(blocks)), lengths),
        tokens=np.array([block.token for block in blocks], np.int64),
        states=np.array([block.state for block in blocks], np.int64),
        num_candidates=num_candidates,
    )


def _hints(blocks: Sequence[Block], num_ids: int) -> tuple[Int64s, Int64s]:
    shown: list[NDArray[np.int64]] = []
    kinds: list[NDArray[np.int64]] = []
    for block in blocks:
        tokens = np.zeros(1 + block.num_slots, np.int64)
        kind = np.zeros(1 + block.num_slots, np.int64)
        if block.hint is not None:
            given = block.hint.tokens[: block.num_slots]
            tokens[1 : 1 + len(given)] = np.clip(given, 0, num_ids - 1)
            kind[1 : 1 + len(given)] = block.hint.kind
        shown.append(tokens)
        kinds.append(kind)
    return np.concatenate(shown), np.concatenate(kinds)
