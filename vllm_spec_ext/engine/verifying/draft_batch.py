# SPDX-License-Identifier: Apache-2.0
"""The draft nodes of one step, laid out as vLLM lays out its logits; numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.draft_tree import chain_parents, node_depths

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class DraftBatch:
    """For each request of the batch its root row, then one row for each draft node.

    The root row is the last verified token (or the last token of a prefill chunk).
    """

    parents: Int64s  # [num_nodes] parent within the request, -1 = root
    tokens: Int64s  # [num_nodes]
    node_starts: Int64s  # [num_requests + 1] first node of each request

    @classmethod
    def of(
        cls, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int] | None]
    ) -> "DraftBatch":
        """Flatten the drafts of a batch.

        Args:
            tokens: Draft tokens of each request, in batch order; empty for none.
            parents: Parent of each node, -1 = root; None for a chain.
        """
        sizes = [len(draft) for draft in tokens]
        trees = (
            chain_parents(size) if given is None else given[:size]
            for size, given in zip(sizes, parents, strict=True)
        )
        return cls(
            parents=np.fromiter(chain.from_iterable(trees), np.int64),
            tokens=np.fromiter(chain.from_iterable(tokens), np.int64),
            node_starts=np.array([0, *accumulate(sizes)], np.int64),
        )

    @property
    def num_requests(self) -> int:
        """Requests in the batch, those without nodes included."""
        return len(self.node_starts) - 1

    def part(self, start: int, end: int) -> "DraftBatch":
        """Of these requests, `end` not included."""
        first, last = self.node_starts[start], self.node_starts[end]
        return DraftBatch(
            parents=self.parents[first:last],
            tokens=self.tokens[first:last],
            node_starts=self.node_starts[start : end + 1] - first,
        )

    def without(self, rows: NDArray[np.bool_]) -> "DraftBatch":
        """The same with placeholders, which nothing accepts, for some draft tokens.

        Args:
            rows: [num_rows] of these.
        """
        tokens = np.where(np.delete(rows, self.root_rows), -1, self.tokens)
        return replace(self, tokens=tokens)

    @cached_property
    def root_rows(self) -> Int64s:
        """[num_requests] row of each request's root."""
        return self.node_starts[:-1] + np.arange(self.num_requests)

    @cached_property
    def request_of_row(self) -> Int64s:
        """[num_rows] request of each row."""
        return np.repeat(np.arange(self.num_requests), np.diff(self.node_starts) + 1)

    @cached_property
    def depth_of_row(self) -> Int64s:
        """[num_rows] draft tokens between the root and the row, the row's own included."""
        parents = self.parents.tolist()
        depths: list[int] = []
        for first, end in pairwise(self.node_starts.tolist()):
            depths += [0, *(depth + 1 for depth in node_depths(parents[first:end]))]
        return np.array(depths, np.int64)
