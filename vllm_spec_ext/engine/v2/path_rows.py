# SPDX-License-Identifier: Apache-2.0
"""Rows of a step laid out path by path, for sampling constraints that read what came before.

vLLM's V2 kernels of penalties, bad words and thinking budgets take a row's earlier draft tokens
from the rows right before it (``expanded_local_pos``). In a tree these are other branches. Here
every path from the root to a leaf becomes a chain of its own; rows that paths share are repeated.
Rows of requests whose parameters read nothing before them stay as they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch, Int64s

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext


@dataclass(frozen=True)
class PathRows:
    """A layout of the rows of a step."""

    rows: Int64s  # [n] row of the step that stands here
    depths: Int64s  # [n] places behind the root of its path
    places: Int64s  # [num_rows] a place of each row
    drafted: Int64s  # [n] the row's draft token; anything where the root stands

    def rows_on(self, device: torch.device) -> torch.Tensor:
        """``rows`` as an index."""
        return torch.from_numpy(self.rows).to(device)

    def places_on(self, device: torch.device) -> torch.Tensor:
        """``places`` as an index."""
        return torch.from_numpy(self.places).to(device)

    def spread(self, context: "LogitsContext") -> "LogitsContext":
        """vLLM's context of the step in this layout.

        Draft tokens are ours: by their positions, those of their depths, vLLM takes many of a
        request that has hardly begun for padding (0.32 ``gather_draft_sampled``).
        """
        slots, ids = context.expanded_idx_mapping, context.input_ids
        rows = self.rows_on(slots.device)
        depths = torch.from_numpy(self.depths).to(slots.device, context.expanded_local_pos.dtype)
        drafted = torch.from_numpy(self.drafted).to(ids.device, ids.dtype)
        return replace(
            context,
            expanded_idx_mapping=slots[rows],
            expanded_local_pos=depths,
            input_ids=torch.where(depths > 0, drafted, ids[rows]),
            pos=context.pos[rows],
        )


def path_rows(batch: DraftBatch, reads_history: Sequence[bool]) -> PathRows:
    """Lay out the rows of a batch.

    Args:
        batch: The rows.
        reads_history: Of each request, whether its sampling parameters look at what came before.
    """
    rows: list[int] = []
    depths: list[int] = []
    drafted: list[int] = []
    places = np.full(len(batch.request_of_row), -1, np.int64)
    parents, tokens = batch.parents.tolist(), batch.tokens.tolist()
    for request, root in enumerate(batch.root_rows.tolist()):
        first, end = batch.node_starts[request : request + 2].tolist()
        as_they_are = [list(range(end - first))]
        paths = _paths(parents[first:end]) if reads_history[request] else as_they_are
        for path in paths:
            for depth, node in enumerate([-1, *path]):
                row = root + 1 + node
                if places[row] < 0:
                    places[row] = len(rows)
                rows.append(row)
                depths.append(depth)
                drafted.append(tokens[first + node] if node >= 0 else -1)
    return PathRows(
        np.array(rows, np.int64), np.array(depths, np.int64), places, np.array(drafted, np.int64)
    )


def _paths(parents: list[int]) -> Iterable[list[int]]:
    """Nodes from the root to each leaf; one empty path where there are no nodes."""
    inner = set(parents)
    leaves = [node for node in range(len(parents)) if node not in inner] or [-1]
    for leaf in leaves:
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = parents[node]
        yield path[::-1]
