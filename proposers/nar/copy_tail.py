# SPDX-License-Identifier: Apache-2.0
"""Paths that go on behind the block: where the last slot holds what was copied, the copy goes on.

A block has as many slots as the drafter was trained with. Text that repeats repeats for longer, and
the tokens behind the block are known without a pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_spec_ext.proposers.base import Draft, IntArray
from vllm_spec_ext.proposers.draft_tree import node_depths, parents_of
from vllm_spec_ext.proposers.models import SlotCandidates

LONGEST = 32  # tokens behind a block
_MEMORY = 0.99  # what remains of the past after one more such node
_PRIOR, _STRENGTH = 0.9, 10.0  # of copied tokens that are right behind a right one


def with_tail(
    found: SlotCandidates, shown: IntArray, behind: IntArray, probability: float
) -> SlotCandidates:
    """More slots, which hold the copy alone, and only behind the copied token in the last slot.

    Args:
        found: Of the block's slots.
        shown: [n] tokens that its slots were shown; fewer than slots = nothing follows.
        behind: [k] tokens that follow these.
        probability: That one of them is right if those before it are.
    """
    num_slots, num_before, num_candidates = found.log_probs.shape
    if not len(behind) or len(shown) < num_slots:
        return found
    places = np.flatnonzero(found.tokens[-1] == shown[num_slots - 1])
    if not len(places):
        return found
    own = found.log_probs
    if num_before < num_candidates:
        own = np.broadcast_to(own, (num_slots, num_candidates, num_candidates))
    added = np.full((len(behind), num_candidates, num_candidates), -np.inf, np.float32)
    added[1:, 0, 0] = added[0, places[0], 0] = math.log(probability)
    tokens = np.broadcast_to(behind[:, None], (len(behind), num_candidates))
    return SlotCandidates(np.concatenate([found.tokens, tokens]), np.concatenate([own, added]))


@dataclass(frozen=True)
class _Tail:
    nodes: tuple[int, ...]  # of a draft, each behind the one before
    above: int  # the node behind which they stand


class CopyTail:
    """Learns how often copies go on behind a block, over all requests."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._tried = self._right = 0.0
        self._pending: dict[str, _Tail] = {}

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def probability(self) -> float:
        """That a copied token behind the block is right if the one before it is."""
        return (self._right + _PRIOR * _STRENGTH) / (self._tried + _STRENGTH)

    def drafted(self, request_id: str, draft: Draft, num_slots: int) -> None:
        """Remember the nodes of a draft that stand behind its block."""
        parents = parents_of(draft)
        depths = node_depths(parents)
        nodes = tuple(node for node, depth in enumerate(depths) if depth >= num_slots)
        if nodes:
            self._pending[request_id] = _Tail(nodes, parents[nodes[0]])

    def verified(self, request_id: str, num_drafted: int, accepted: Sequence[int]) -> None:
        """Learn from what became of them; those behind a wrong token tell nothing."""
        tail = self._pending.pop(request_id, None)
        if tail is None:
            return
        right = {*accepted}
        before = tail.above
        for node in tail.nodes:
            if before not in right or node >= num_drafted:
                return
            self._tried = self._tried * _MEMORY + 1.0
            self._right = self._right * _MEMORY + float(node in right)
            before = node

    def forget(self, request_id: str) -> None:
        """A request is gone, and with it the outcome of its last draft."""
        self._pending.pop(request_id, None)
