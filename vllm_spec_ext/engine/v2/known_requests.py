# SPDX-License-Identifier: Apache-2.0
"""Tokens and KV blocks of the requests of a V2 runner, on the host.

The V2 runner keeps them on the device (vLLM 0.32 ``RequestState``, ``BlockTables``). Everything
in them came from the host: the scheduler's output and each step's new tokens.
"""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.engine.models.batch_events import leading_ids
from vllm_spec_ext.engine.requests.state import KnownRequest

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput


class _Growing:
    """Tokens or blocks of a request in one array; views of its beginning stay as they are."""

    __slots__ = ("_array", "length")

    def __init__(self, values: Sequence[int]) -> None:
        self._array = np.array(values, np.int32)
        self.length = len(values)

    def append(self, values: Sequence[int]) -> None:
        end = self.length + len(values)
        if end > len(self._array):
            larger = np.empty(2 * end, np.int32)
            larger[: self.length] = self._array[: self.length]
            self._array = larger
        self._array[self.length : end] = values
        self.length = end

    @property
    def view(self) -> NDArray[np.int32]:
        return self._array[: self.length]


class _Request:
    __slots__ = ("blocks", "num_ids", "num_prompt_tokens", "number", "params", "tokens")

    def __init__(self, new: "NewRequestData", number: int) -> None:
        assert new.prefill_token_ids is not None
        assert new.sampling_params is not None
        self.number = number
        self.tokens = _Growing(new.prefill_token_ids)
        self.num_prompt_tokens = int(new.prompt_len)
        self.params: SamplingParams = new.sampling_params
        self.num_ids = leading_ids(new)
        self.blocks = [_Growing(blocks) for blocks in new.block_ids]


class KnownRequests:
    """Of one runner."""

    def __init__(self) -> None:
        """None yet."""
        self._requests: dict[str, _Request] = {}
        self._numbers = count()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def schedule(self, scheduler_output: "SchedulerOutput") -> None:
        """Requests that come, or come back with what they had said; blocks of those that go on."""
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params is not None:
                self._requests[new.req_id] = _Request(new, next(self._numbers))
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks and request_id in self._requests:
                for table, more in zip(self._requests[request_id].blocks, blocks, strict=True):
                    table.append(more)

    def append(self, request_ids: Iterable[str], new_tokens: Iterable[Sequence[int]]) -> None:
        """The new tokens of a step; none of requests in mid-prefill."""
        for request_id, tokens in zip(request_ids, new_tokens, strict=True):
            self._requests[request_id].tokens.append(tokens)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> KnownRequest:
        """One of them."""
        found = self._requests[request_id]
        return KnownRequest(found.tokens.view, found.num_prompt_tokens, found.params)

    def number(self, request_id: str) -> int | None:
        """Tells a request from one that had its id before, or comes back; None if it is gone."""
        found = self._requests.get(request_id)
        return None if found is None else found.number

    def num_tokens(self, request_id: str) -> int:
        """Verified tokens of a request, the prompt included."""
        return self._requests[request_id].tokens.length

    def num_ids(self, request_id: str) -> int | None:
        """Leading tokens that have ids, of a prompt with embeddings or pictures; None: all do."""
        return self._requests[request_id].num_ids

    def blocks(self, request_id: str, group: int = 0) -> NDArray[np.int32]:
        """[n] ids of a request's KV blocks of a KV group."""
        return self._requests[request_id].blocks[group].view
