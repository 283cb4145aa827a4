# SPDX-License-Identifier: Apache-2.0
"""Who has learned what: every token of a request goes into its overlays exactly once.

Each request has a cursor, the number of its tokens that were learned. A preempted request is
reported as finished and comes back with the same id: its own overlay is rebuilt from its tokens,
but the shared one already knows them, so the cursor of the shared overlay is remembered for a
while, with a hash of the tokens in case another request gets the same id. It counts for the overlay
that it was reached in: one that was emptied since, or is another group's, knows nothing.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from vllm_spec_ext.proposers.adaptive_ngram.changed_rows import ChangedRows
from vllm_spec_ext.proposers.adaptive_ngram.overlay import OverlayPool, learn
from vllm_spec_ext.proposers.adaptive_ngram.settings import NgramSettings
from vllm_spec_ext.proposers.adaptive_ngram.shared_overlays import NO_SLOT, SharedOverlays
from vllm_spec_ext.proposers.base import IntArray, RequestStep

REMEMBERED_PER_SLOT = 8


@dataclass
class RequestState:
    """What is known of a running request."""

    slot: int  # in the pool of request overlays; -1 = none
    cursor: int = 0  # tokens learned by its own overlay
    shared_slot: int = NO_SLOT  # the shared overlay in the latest step
    shared_overlay: tuple[int, int] = (NO_SLOT, 0)  # which one shared_cursor is about
    shared_cursor: int = 0  # tokens learned by the shared overlay
    crc: int = 0  # of the tokens before shared_cursor
    crc_without_last: int | None = None  # of these but the last one, where it is known

    @property
    def learned(self) -> list[tuple[int, int]]:
        """Tokens that the shared overlay learned and their CRC; without the last one, too.

        vLLM takes the last token of a session's turn back.
        """
        found = [(self.shared_cursor, self.crc)]
        if self.crc_without_last is not None:
            found.append((self.shared_cursor - 1, self.crc_without_last))
        return found


class Learner:
    """The overlays and the state of all requests."""

    def __init__(self, settings: NgramSettings, max_num_seqs: int, vocab_size: int) -> None:
        """Reserve the overlays.

        Args:
            settings: The method's settings.
            max_num_seqs: Most requests in a batch.
            vocab_size: Ids from here on are not learned.
        """
        self.settings = settings
        self.vocab_size = vocab_size
        self.per_request = settings.overlay in ("request", "both")
        self.is_shared = settings.overlay in ("shared", "both")
        # A pool that is not used is as small as possible: kernels take both.
        self.requests = (
            OverlayPool(max_num_seqs, settings.request_buckets)
            if self.per_request
            else OverlayPool(1, 1)
        )
        self.groups = (
            SharedOverlays(settings.max_cache_salts, settings.shared_buckets)
            if self.is_shared
            else SharedOverlays(0, 1)
        )
        self.shared = self.groups.pool
        self.changed: ChangedRows | None = None
        """Told of all that is learned, where the tables are copied."""
        self.states: OrderedDict[str, RequestState] = OrderedDict()  # least recently seen first
        # Shared overlay, and what it learned.
        self._past: OrderedDict[str, tuple[tuple[int, int], list[tuple[int, int]]]] = OrderedDict()
        self._past_limit = REMEMBERED_PER_SLOT * max_num_seqs

    @property
    def shared_clock(self) -> int:
        """Tokens that the shared overlay of requests without a salt has learned."""
        return int(self.shared.arrays.clocks[0])

    def learn(self, requests: Sequence[RequestStep], shared_half_life: float) -> list[int]:
        """Learn what is new in each request, in order.

        Args:
            requests: The step's requests.
            shared_half_life: Half-life of the shared overlay in this step.

        Returns:
            The overlay of each request in ``self.requests``, -1 = none.
        """
        if not (self.per_request or self.is_shared):
            return [-1] * len(requests)
        current = {request.request_id for request in requests}
        shared: dict[str | None, int] = {None: NO_SLOT}
        if self.is_shared:
            shared = self.groups.slots(r.share_group for r in requests if r.options.enabled)
        slots = []
        for request in requests:
            if not request.options.enabled:
                slots.append(-1)
                continue
            state = self._state(request, current)
            self._learn_own(request, state)
            state.shared_slot = shared[request.share_group] if self.is_shared else NO_SLOT
            if state.shared_slot != NO_SLOT and request.options.remember:
                self._learn_shared(request, state, shared_half_life)
            slots.append(state.slot)
        return slots

    def slot(self, request_id: str) -> int:
        """The overlay in ``self.requests`` of a request, -1 = none."""
        state = self.states.get(request_id)
        return -1 if state is None else state.slot

    def shared_slot(self, request_id: str) -> int:
        """The overlay in ``self.shared`` that a request of the step may see, -1 = none."""
        state = self.states.get(request_id)
        return NO_SLOT if state is None else state.shared_slot

    def _state(self, request: RequestStep, current: set[str]) -> RequestState:
        """The request's state, new or checked against a roll-back."""
        state = self.states.get(request.request_id)
        if state is None:
            state = RequestState(self._acquire(current) if self.per_request else -1)
            self.states[request.request_id] = state
            self._recall(request, state)
        self.states.move_to_end(request.request_id)
        # Tokens that an earlier step learned were taken back: what the table holds is wrong.
        settled = len(request.token_ids) - len(request.new_tokens)
        if state.cursor > settled:
            if state.slot >= 0:
                self.requests.clear(state.slot)
            state.cursor = 0
        if state.shared_cursor > settled:
            state.shared_cursor = max(settled, 0)
            state.crc = _crc(request.token_ids[: state.shared_cursor])
            state.crc_without_last = None
        return state

    def _acquire(self, current: set[str]) -> int:
        """A free overlay; if there is none, that of the request unseen for the longest time."""
        slot = self.requests.acquire()
        if slot is None:
            for request_id in self.states:
                if request_id not in current:
                    self.finish([request_id])
                    slot = self.requests.acquire()
                    break
        return -1 if slot is None else slot

    def _recall(self, request: RequestStep, state: RequestState) -> None:
        """Find out how much of a request that comes back the shared overlay knows already."""
        past = self._past.pop(request.request_id, None)
        if past is None:
            return
        overlay, learned = past
        for cursor, crc in learned:
            if 0 < cursor <= len(request.token_ids) and _crc(request.token_ids[:cursor]) == crc:
                state.shared_overlay, state.shared_cursor, state.crc = overlay, cursor, crc
                return

    def _start(self, request: RequestStep, cursor: int) -> int:
        """First position to learn."""
        length = len(request.token_ids)
        if self.settings.relearn_window:
            # Published: all trigrams inside the window, at every step.
            return length - min(self.settings.relearn_window, length) + 2
        if not self.settings.learn_prompt:
            cursor = max(cursor, request.num_prompt_tokens)
        return max(cursor, length - max(self.settings.prompt_window, len(request.new_tokens)))

    def _learn_own(self, request: RequestStep, state: RequestState) -> None:
        if state.slot >= 0:
            start = self._start(request, state.cursor)
            self._add(self.requests, state.slot, request.token_ids, start, self.settings.half_life)
        state.cursor = len(request.token_ids)

    def _learn_shared(self, request: RequestStep, state: RequestState, half_life: float) -> None:
        overlay = self.groups.identity(state.shared_slot)
        if state.shared_overlay != overlay:
            state.shared_overlay, state.shared_cursor, state.crc = overlay, 0, 0
            state.crc_without_last = None
        start = self._start(request, state.shared_cursor)
        self._add(self.shared, state.shared_slot, request.token_ids, start, half_life)
        new = request.token_ids[state.shared_cursor :]
        if len(new):
            state.crc_without_last = _crc(new[:-1], state.crc)
            state.crc = _crc(new[-1:], state.crc_without_last)
        state.shared_cursor = len(request.token_ids)

    def _add(
        self, pool: OverlayPool, slot: int, tokens: IntArray, start: int, half_life: float
    ) -> None:
        if start >= len(tokens):
            return
        # Two tokens of context are enough, and a short array costs less to hand over.
        first = max(0, start - 2)
        new = np.ascontiguousarray(tokens[first:], np.int32)
        learn(
            pool.arrays,
            slot,
            new,
            start - first,
            self.vocab_size,
            self.settings.backoff != "off",
            float(half_life),
            float(self.settings.increment),
            float(self.settings.cap),
        )
        if self.changed is not None:
            self.changed.learned(pool, slot, new, start - first, self.vocab_size)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget requests; the shared overlays keep what they learned."""
        for request_id in request_ids:
            state = self.states.pop(request_id, None)
            if state is None:
                continue
            if state.slot >= 0:
                self.requests.release(state.slot)
            if state.shared_cursor:
                self._past[request_id] = state.shared_overlay, state.learned
                while len(self._past) > self._past_limit:
                    self._past.popitem(last=False)

    def warm_up(self) -> None:
        """Compile the kernel with a table of its own."""
        pool = OverlayPool(1, 1)
        self._add(pool, 0, np.zeros(3, np.int32), 0, 1.0)


def _crc(tokens: IntArray, start: int = 0) -> int:
    """CRC of token ids, continued from ``start``."""
    return crc32(np.ascontiguousarray(tokens, np.int32).data, start)
