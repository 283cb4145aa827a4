# SPDX-License-Identifier: Apache-2.0
"""A tree while it grows: what one model drafted for one request."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_spec_ext.proposers.growth.shapes import Shape

if TYPE_CHECKING:
    import torch

UNDRAWN = -1  # token of a node that has a place and no draw yet


@dataclass(frozen=True)
class Wish:
    """What to draft for a request with one model."""

    request: int  # index in the StepContext
    room: int  # most nodes
    shape: Shape | None = None  # draw this tree; None = choose the best candidates
    min_log_prob: float = -math.inf  # chosen nodes whose path is less likely are left out


@dataclass(eq=False)
class GrownTree:
    """Nodes in the order in which they were found, parents first."""

    wish: Wish
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # -1 = the last verified token
    depths: list[int] = field(default_factory=list)  # 0 = child of the root
    ranks: list[int] = field(default_factory=list)  # place among the children of its parent
    log_probs: list[float] = field(default_factory=list)
    """Of the path to each node: to the model if chosen, by the shape's estimate if drawn."""
    places: list[int] = field(default_factory=list)  # drawn: node of the shape
    read: set[int] = field(default_factory=set)  # nodes that the model read, -1 = the root
    rows: "list[torch.Tensor]" = field(default_factory=list)
    """Drawn: [vocab] distribution of each node's draw; one for each node that has a token."""

    def __len__(self) -> int:
        return len(self.tokens)

    def choose(self, parent: int, tokens: list[int], log_probs: list[float]) -> list[int]:
        """Hang a node's candidates below it, likeliest first; returns the new nodes.

        Args:
            parent: -1 = the root.
            tokens: Candidates.
            log_probs: Of each, given the path to the parent.
        """
        above = self.log_probs[parent] if parent >= 0 else 0.0
        added = []
        for rank, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
            if above + log_prob >= self.wish.min_log_prob and log_prob > -math.inf:
                added.append(self._add(token, parent, rank, above + log_prob))
        return added

    def reserve(self, parent: int) -> list[int]:
        """Places of the draws below a node as its shape says; returns the new nodes."""
        shape = self.wish.shape
        assert shape is not None
        added = []
        for place in shape.children(self.places[parent] if parent >= 0 else -1):
            log_prob = math.log(max(shape.reach[place], 1e-30))
            added.append(self._add(UNDRAWN, parent, shape.ranks[place], log_prob))
            self.places.append(place)
        return added

    def _add(self, token: int, parent: int, rank: int, log_prob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        self.ranks.append(rank)
        self.log_probs.append(log_prob)
        return len(self.tokens) - 1

    def best(self) -> list[int]:
        """The nodes that fit into the room, the likeliest ones of a chosen tree; in their order.

        A child is never likelier than its parent and stands behind it, so they are a tree.
        """
        room = self.wish.room
        if len(self) <= room:
            return list(range(len(self)))
        order = sorted(range(len(self)), key=lambda node: -self.log_probs[node])  # stable
        return sorted(order[:room])
