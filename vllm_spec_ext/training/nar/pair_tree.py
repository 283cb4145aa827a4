# SPDX-License-Identifier: Apache-2.0
"""The best draft tree of a lattice of candidates whose probability depends on the token before.

As for independent heads, the likeliest paths' end nodes maximise the expected accepted length; here
each node's children are ordered by their probability behind it. Plain numpy, for measuring.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Lattice(NamedTuple):
    """Candidates of one block; slots K, candidates C."""

    candidates: NDArray[np.int64]  # [K, C]
    log_probs: NDArray[np.float32]  # [K, C] of each slot alone
    first: int  # token in front
    before: NDArray[np.float32] | None  # [vocab, rank] selector's table of tokens before; None = no
    behind: NDArray[np.float32] | None  # [K, C, rank] its rows of the candidates
    weights: NDArray[np.float32] | None  # [K, rank] of the slots' states

    def children(self, slot: int, before: int) -> NDArray[np.float32]:
        """[C] log-probability of a slot's candidates behind a token.

        The selector moves probability between candidates; what they have together stays.
        """
        own = self.log_probs[slot]
        if self.before is None or self.behind is None or self.weights is None:
            return own
        moved = own + self.behind[slot] @ (self.before[before] * self.weights[slot])
        together = np.logaddexp.reduce(own) - np.logaddexp.reduce(moved)
        made: NDArray[np.float32] = moved + together
        return made


def best_tree(lattice: Lattice, budget: int, least: float) -> tuple[list[int], list[int]]:
    """The ``budget`` likeliest paths' end nodes.

    Args:
        lattice: The block.
        budget: Most nodes.
        least: Paths of a lower log-probability are left out.

    Returns:
        Token and parent (-1 = the last verified token) of each node, parents first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    # A node waits with its best child, and each child with its next sibling; ties in their order.
    waiting: list[tuple[float, int, int, int, int, float, list[float], list[int]]] = []
    pushed = 0

    def push(parent: int, slot: int, rank: int, path: float, ours: list[float], order: list[int]):  # type: ignore[no-untyped-def]
        nonlocal pushed
        entry = (-(path + ours[rank]), pushed, parent, slot, rank, path, ours, order)
        heapq.heappush(waiting, entry)
        pushed += 1

    def open_node(parent: int, slot: int, before: int, path: float) -> None:
        found = lattice.children(slot, before)
        order = np.argsort(-found, kind="stable")
        push(parent, slot, 0, path, found[order].tolist(), order.tolist())

    open_node(-1, 0, lattice.first, 0.0)
    while waiting and len(tokens) < budget:
        score, _, parent, slot, rank, path, ours, order = heapq.heappop(waiting)
        if -score < least:
            break
        node, token = len(tokens), int(lattice.candidates[slot, order[rank]])
        tokens.append(token)
        parents.append(parent)
        if rank + 1 < len(order):
            push(parent, slot, rank + 1, path, ours, order)
        if slot + 1 < len(lattice.candidates):
            open_node(node, slot + 1, token, -score)
    return tokens, parents
