# SPDX-License-Identifier: Apache-2.0
"""Hidden states of steps that nobody read: they are read with those of the next step that is.

In each of these steps every request of the batch got one token, as in
:mod:`..drafting.unread_tokens`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm_spec_ext.engine.models.hosted_model import BatchRow


class UnreadStates:
    """Of one model on one rank."""

    def __init__(self) -> None:
        """None yet."""
        self._steps: list[list[torch.Tensor]] = []

    def keep(self, states: Sequence[torch.Tensor], num_requests: int) -> None:
        """A step goes by.

        Args:
            states: [rows of the step, hidden] each; vLLM may use their memory again.
            num_requests: First rows of these, one a request.
        """
        self._steps.append([state[:num_requests].clone() for state in states])

    def join(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The states of a step, with those of the steps before it in front.

        Args:
            states: As of :meth:`keep`, of the step that is read.
        """
        steps, self._steps = [*self._steps, list(states)], []
        return list(map(torch.cat, zip(*steps, strict=True)))


def behind(row: BatchRow) -> BatchRow:
    """A request after its step, as if that had been one step more ago."""
    assert row.state_rows is not None
    computed = row.computed + len(row.state_rows)
    return replace(row, computed=computed, state_rows=row.state_rows[:0])


def with_unread(
    rows: Sequence[BatchRow], places: Mapping[str, int], num_requests: int, num_steps: int
) -> list[BatchRow]:
    """The requests of a batch, and what they read in unread steps.

    Args:
        rows: After the step that is read.
        places: Row of each request in each of the unread steps; those that were not in all of them
            are left out.
        num_requests: In each of these.
        num_steps: Unread ones.
    """
    found = []
    for row in rows:
        assert row.state_rows is not None
        states, place = row.state_rows + num_steps * num_requests, places.get(row.request_id)
        if place is None:
            found.append(replace(row, state_rows=states))
            continue
        earlier = np.arange(num_steps, dtype=np.int64) * num_requests + place
        found.append(
            replace(
                row,
                computed=row.computed - num_steps,
                state_rows=np.concatenate([earlier, states]),
            )
        )
    return found
