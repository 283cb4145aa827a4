# SPDX-License-Identifier: Apache-2.0
"""Numbers of share groups, as part of a key: what one group said is not found by another."""

from collections import OrderedDict

from vllm_spec_ext.proposers.base import UNSALTED


class ShareNumbers:
    """A number for each share group, and for each request that shares with none.

    No number is given twice: what a forgotten group said cannot be found any more.
    """

    def __init__(self, max_salted: int) -> None:
        """Start without any.

        Args:
            max_salted: Most groups beside the one of requests without a salt.
        """
        self._max_salted = max_salted
        self._groups: OrderedDict[str, int] = OrderedDict()  # latest used last
        self._requests: dict[str, int] = {}
        self._next = 0

    def of(self, group: str | None, request_id: str) -> int:
        """Of a request's group, or of itself."""
        if group is None:
            if request_id not in self._requests:
                self._requests[request_id] = self._new()
            return self._requests[request_id]
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = self._new()
            salted = [one for one in self._groups if one != UNSALTED]
            if len(salted) > self._max_salted:
                del self._groups[salted[0]]
        self._groups.move_to_end(group)
        return found

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._requests.pop(request_id, None)

    def _new(self) -> int:
        self._next += 1
        return self._next
