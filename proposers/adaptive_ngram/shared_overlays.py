# SPDX-License-Identifier: Apache-2.0
"""Shared overlays: one for each group of requests that may see each other's tokens.

The pool is fixed, so many groups in turn cost no more memory than a few. Slot 0 belongs to requests
without a ``cache_salt`` for good, as it is what ``overlay_file`` holds. The others go to the groups
that came last.
"""

from collections import OrderedDict
from collections.abc import Iterable

from vllm_spec_ext.proposers.adaptive_ngram.overlay import OverlayPool
from vllm_spec_ext.proposers.base import UNSALTED

NO_SLOT = -1


class SharedOverlays:
    """Which slot of the pool is whose."""

    def __init__(self, max_salted: int, num_buckets: int) -> None:
        """Reserve the tables.

        Args:
            max_salted: Most groups beside the one of requests without a salt.
            num_buckets: Buckets of each overlay, see :class:`OverlayPool`.
        """
        self.pool = OverlayPool(1 + max_salted, num_buckets)
        slot = self.pool.acquire()
        assert slot == 0
        self._slots: OrderedDict[str, int] = OrderedDict({UNSALTED: slot})  # latest used last

    def slots(self, groups: Iterable[str | None]) -> dict[str | None, int]:
        """The overlay of each group of one step; ``NO_SLOT`` for None and where all are in use.

        No group of the step takes the overlay of another one: what is learned for one request
        must not be what the next one is drafted from.

        Args:
            groups: Share groups of the step's requests.
        """
        wanted = dict.fromkeys(group for group in groups if group is not None)
        found: dict[str | None, int] = {None: NO_SLOT}
        for group in wanted:
            if group in self._slots:
                self._slots.move_to_end(group)
        for group in wanted:
            slot = self._slots.get(group)
            if slot is None:
                slot = self._acquire(wanted)
                if slot is not None:
                    self._slots[group] = slot
            found[group] = NO_SLOT if slot is None else slot
        return found

    def identity(self, slot: int) -> tuple[int, int]:
        """Another one whenever the slot is emptied or goes to another group."""
        return slot, int(self.pool.arrays.generations[slot])

    def occupancy(self) -> tuple[int, int]:
        """Rows used and rows evicted; reads the tables."""
        slots = list(self._slots.values())
        used = sum(self.pool.rows_used(slot) for slot in slots)
        return used, sum(int(self.pool.arrays.evictions[slot]) for slot in slots)

    def _acquire(self, wanted: Iterable[str]) -> int | None:
        """A free overlay, or that of the group unused for longest."""
        slot = self.pool.acquire()
        if slot is None:
            for group in self._slots:
                if group != UNSALTED and group not in wanted:
                    self.pool.release(self._slots.pop(group))
                    return self.pool.acquire()
        return slot
