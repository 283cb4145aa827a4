# SPDX-License-Identifier: Apache-2.0
"""Seeded requests draw the noise of plain decoding, whatever was drafted.

Plain decoding takes one draw from a seeded request's generator for every token. A step with draft
nodes samples at many rows; here all rows of one depth get the same draw, the one that plain
decoding would use for that token, and after the step the generator stands where plain decoding
would have left it. At most one node of a depth is emitted, so no draw is used twice in a text. The
result: with a seed, the text does not depend on drafts, draft lengths, clocks or other requests.
"""

from collections.abc import Iterator
from typing import Any

import torch

from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch


class SeededRows(dict[int, torch.Generator]):
    """Row -> generator, as vLLM's samplers take it: they draw once for each of ``items()``.

    (vLLM 0.32 v1/sample/ops/topk_topp_sampler.py ``random_sample`` and ``forward_cpu``.) How much a
    draw takes from a generator is theirs to know; the states in between are noted here.
    """

    def __init__(self, by_request: dict[int, torch.Generator], batch: DraftBatch) -> None:
        """Spread the generators of the seeded requests over their rows."""
        if not by_request:  # of most batches
            super().__init__()
            return
        requests = batch.request_of_row.tolist()
        super().__init__(
            {
                row: by_request[request]
                for row, request in enumerate(requests)
                if request in by_request
            }
        )
        self._requests = requests
        self._depths = batch.depth_of_row.tolist()
        # By request: the state before the draw of each depth that was reached.
        self._states = {request: [own.get_state()] for request, own in by_request.items()}

    def items(self) -> Any:
        """Pairs of row and generator; each must draw before the next pair is asked for."""
        return self._each_before_its_draw()

    def _each_before_its_draw(self) -> Iterator[tuple[int, torch.Generator]]:
        for row, generator in super().items():  # a parent's row stands before its children's
            states, depth = self._states[self._requests[row]], self._depths[row]
            generator.set_state(states[depth])
            yield row, generator
            if depth + 1 == len(states):
                states.append(generator.get_state())

    def settle(self, num_accepted: Any, by_request: dict[int, torch.Generator]) -> None:
        """Leave each generator behind the draws of the tokens that were emitted.

        Args:
            num_accepted: [num_requests] accepted nodes; one more token is emitted.
            by_request: As given to the constructor.
        """
        for request, generator in by_request.items():
            states = self._states[request]
            if len(states) > 1:  # else nothing was drawn: the whole batch is greedy
                generator.set_state(states[int(num_accepted[request]) + 1])
