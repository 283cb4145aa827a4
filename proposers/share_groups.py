# SPDX-License-Identifier: Apache-2.0
"""What a proposer keeps of each share group: groups that were not used for long make room."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from vllm_spec_ext.proposers.records import UNSALTED

Kept = TypeVar("Kept")


class LatestGroups(Generic[Kept]):
    """One thing for each share group; of groups with a salt, for the latest used ones."""

    def __init__(self, max_salted: int, make: Callable[[], Kept]) -> None:
        """Start without any.

        Args:
            max_salted: Most groups beside the one of requests without a salt.
            make: Makes what is kept of a group that comes, or comes again.
        """
        self._max_salted = max_salted
        self._make = make
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # latest used last

    def __len__(self) -> int:
        return len(self._kept)

    def values(self) -> Iterable[Kept]:
        """Of all groups."""
        return self._kept.values()

    def find(self, group: str) -> Kept | None:
        """What is kept of a group; None if it is not known."""
        if group in self._kept:
            self._kept.move_to_end(group)
        return self._kept.get(group)

    def of(self, group: str) -> Kept:
        """The same, made if it is not known; the salted group unused for longest makes room."""
        found = self.find(group)
        if found is None:
            found = self._kept[group] = self._make()
            salted = [one for one in self._kept if one != UNSALTED]
            if len(salted) > self._max_salted:
                del self._kept[salted[0]]
        return found
