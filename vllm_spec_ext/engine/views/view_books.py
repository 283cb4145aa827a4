# SPDX-License-Identifier: Apache-2.0
"""What the views of one engine share: KV blocks of the step's requests, spill blocks, known means.

Kept on rank 0, without vLLM. A draft's KV goes to the request's own tail, which the next step of
the target overwrites; what lies behind its last block goes to spill blocks.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.engine.models.batch_events import BlockEvents
from vllm_spec_ext.engine.models.branches import Scratch
from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.engine.views.known_pages import KnownPages

Int32s = NDArray[np.int32]


class ViewBooks:
    """Of one engine."""

    def __init__(self) -> None:
        """Without KV; :meth:`bind` brings it."""
        self.block_size = 1
        self.round_number = 0
        """Of the round that goes on; rounds before it are over."""
        self._spill = Scratch(())
        self._spilled: dict[str, list[int]] = {}
        self._rows: dict[str, BatchRow] = {}

    def bind(self, num_blocks: int, block_size: int, spill: Sequence[int]) -> None:
        """Use these KV blocks from now on.

        Args:
            num_blocks: Of the requests.
            block_size: Tokens a block.
            spill: Ids of blocks that belong to no request.
        """
        self.block_size = block_size
        self.known = KnownPages(num_blocks, block_size)
        self._spill = Scratch(spill)

    def begin_step(self, rows: Iterable[BatchRow]) -> None:
        """The target ran these requests, and drafting begins."""
        self._rows = {row.request_id: row for row in rows if not row.is_prefill}

    def end_step(self) -> None:
        """Drafting is over, and with it any round."""
        self.round_number += 1
        self._spill.free_all()
        self._spilled.clear()
        self._rows = {}

    def update(self, events: BlockEvents) -> None:
        """Blocks change hands, before a step runs."""
        self.known.copied(events.copied)
        for blocks in events.allocated:
            self.known.allocate(blocks)
        for blocks, num_computed in events.entered:
            self.known.enter(blocks, num_computed)

    def table(self, request_id: str, num_positions: int) -> Int32s | None:
        """Blocks for this many positions of a request, as far as there are any.

        Args:
            request_id: Of the step.
            num_positions: Certain tokens and drafted ones.

        Returns:
            [width] own blocks, then spill blocks; None for a prompt that has no token ids.
        """
        row = self._rows.get(request_id)
        if row is None or not row.has_ids:
            return None
        width = -(-num_positions // self.block_size)
        own = row.blocks[:width].astype(np.int32)
        spilled = self._spilled.setdefault(request_id, [])
        missing = width - len(own) - len(spilled)
        if missing > 0:
            spilled += self._spill.take(missing) or []
        extra = spilled[: width - len(own)]
        return np.concatenate([own, np.array(extra, np.int32)])
