# SPDX-License-Identifier: Apache-2.0
"""Records what the target says of requests, within bounds; on rank 0 of the first replica.

All rows of the verified text of a recorded request are kept while it runs, since each teaches the
drafts that started before it. Hidden states, the larger part, are kept where a draft failed and at
a share of the other places; which of the two it is, the next step tells.
"""

import random
import zlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_spec_ext.online.trace import Trace
from vllm_spec_ext.options import OnlineOptions
from vllm_spec_ext.proposers.records import UNSALTED

_MAX_ROWS = 256  # of a trace; a longer text becomes several


@dataclass(frozen=True)
class Seen:
    """One request after a step that gave it new tokens."""

    request_id: str
    token_ids: NDArray[np.int32]  # [n] prompt and output; a view, valid during the call only
    num_new: int  # of them from this step, >= 1: the accepted draft tokens and the target's own
    top_tokens: NDArray[np.int32]  # [num_new, m] rows of the verified path, the last one's included
    top_probs: NDArray[np.float32]  # [num_new, m]
    failed_at: int | None = None  # as Trace.failed_at; None = no draft was verified in this step
    state: Tensor | None = None  # [hidden_size] of the last row, from which the next draft starts;
    # width 0 for drafters that do not read it
    temperature: float = 1.0  # as Trace.temperature
    num_prompt_tokens: int | None = None  # likewise


@dataclass
class _Open:
    """A request that is being recorded."""

    token_ids: "array[int]"  # 4 bytes each
    rows: list[int] = field(default_factory=list)
    top_tokens: list[NDArray[np.int32]] = field(default_factory=list)
    top_probs: list[NDArray[np.float32]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    failed_at: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    pending: tuple[int, Tensor] | None = None  # a start whose draft has not been verified
    temperature: float = 1.0
    num_prompt_tokens: int | None = None
    num_bytes: int = 0


class Tap:
    """See the module docstring. Not thread-safe: the engine's step is its only caller."""

    def __init__(self, options: OnlineOptions, write: Callable[[Trace], None]) -> None:
        """Start with nothing recorded.

        Args:
            options: What is recorded, and how much memory that may take.
            write: Takes finished traces.
        """
        self._options = options
        self._write = write
        self._random = random.Random(options.seed)
        self._open: dict[str, _Open] = {}
        self._limit = int(options.buffer_mb * 2**20)
        self.num_bytes = 0
        """Of open requests."""
        self.bytes_elsewhere: Callable[[], int] = lambda: 0
        """Of traces that wait to be written; they count towards the limit."""
        self.num_dropped = 0
        """Requests' steps that were not recorded for lack of memory."""

    def wants(self, request_id: str, share_group: str | None, remember: bool) -> bool:
        """Whether a request is recorded.

        Args:
            request_id: Decides, where a share of the requests is.
            share_group: As of ``RequestStep``: a salted request has its own, and one that shares
                with nobody has none.
            remember: The request's own consent.
        """
        if not remember or (self._options.record != "all" and share_group != UNSALTED):
            return False
        if self._options.requests >= 1.0:
            return True
        drawn = zlib.crc32(f"{self._options.seed}:{request_id}".encode()) / 2**32
        return drawn < self._options.requests

    @property
    def open_requests(self) -> list[str]:
        """Requests of which something is recorded but not handed on."""
        return list(self._open)

    def record(self, seen: Seen) -> None:
        """Take in a step of a request that is wanted."""
        if self.num_bytes + self.bytes_elsewhere() >= self._limit:
            self.num_dropped += 1
            self.finish([seen.request_id])
            return
        before = len(seen.token_ids) - seen.num_new
        found = self._open.get(seen.request_id)
        if found is not None and len(found.token_ids) != before:
            self.finish([seen.request_id])  # a step was missed, or the session's text was changed
            found = None
        if found is None:
            found = self._open[seen.request_id] = _Open(_ids(seen.token_ids[:before]))
            self._grow(found, 4 * before)
        found.temperature, found.num_prompt_tokens = seen.temperature, seen.num_prompt_tokens
        self._settle(found, seen.failed_at)
        found.token_ids += _ids(seen.token_ids[before:])
        # Row t is the distribution of token t + 1: the first new token's is that of the one before.
        found.rows += range(before - 1, len(seen.token_ids) - 1)
        # Copies, as these are a few rows of a whole step's.
        found.top_tokens.append(seen.top_tokens.copy())
        found.top_probs.append(seen.top_probs.copy())
        self._grow(found, 8 * seen.num_new + seen.top_tokens.nbytes + seen.top_probs.nbytes)
        if seen.state is not None:
            found.pending = len(seen.token_ids) - 2, seen.state
        if len(found.rows) >= _MAX_ROWS:
            self._close(seen.request_id, goes_on=True)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone: finished, aborted or preempted, recorded or not."""
        for request_id in request_ids:
            if request_id in self._open:
                self._close(request_id, goes_on=False)

    def _settle(self, found: _Open, failed_at: int | None) -> None:
        """Keep the start of the draft that was just verified, or not."""
        pending, found.pending = found.pending, None
        if pending is None:
            return
        if not failed_at and self._random.random() >= self._options.others:
            return
        position, state = pending
        found.starts.append(position)
        found.failed_at.append(failed_at or 0)
        found.states.append(state.to("cpu", torch.bfloat16, copy=True))
        self._grow(found, 12 + 2 * state.numel())

    def _grow(self, found: _Open, num_bytes: int) -> None:
        found.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _close(self, request_id: str, *, goes_on: bool) -> None:
        found = self._open.pop(request_id)
        self.num_bytes -= found.num_bytes
        if goes_on:
            rest = self._open[request_id] = _Open(found.token_ids[:], pending=found.pending)
            self._grow(rest, 4 * len(rest.token_ids))
        if not found.starts:
            return
        probs = np.concatenate(found.top_probs)
        failed_at = np.array(found.failed_at, np.int32)
        self._write(
            Trace(
                token_ids=np.array(found.token_ids, np.int32),
                rows=np.array(found.rows, np.int32),
                top_tokens=np.concatenate(found.top_tokens),
                top_probs=probs,
                tails=np.maximum(0.0, 1.0 - probs.sum(axis=1)).astype(np.float32),
                starts=np.array(found.starts, np.int32),
                failed_at=failed_at,
                states=torch.stack(found.states),
                chances=np.where(failed_at > 0, 1.0, self._options.others).astype(np.float32),
                temperature=found.temperature,
                num_prompt_tokens=found.num_prompt_tokens,
            )
        )


def _ids(token_ids: NDArray[np.int32]) -> "array[int]":
    return array("i", token_ids.astype(np.intc).tobytes())
