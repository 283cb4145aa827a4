# SPDX-License-Identifier: Apache-2.0
"""Numbers of share groups, as part of a key: what one group said is not found by another."""

from vllm_spec_ext.proposers.share_groups import LatestGroups


class ShareNumbers:
    """A number for each share group, and for each request that shares with none.

    No number is given twice: what a forgotten group said cannot be found any more.
    """

    def __init__(self, max_salted: int) -> None:
        """Start without any.

        Args:
            max_salted: Most groups beside the one of requests without a salt.
        """
        self._groups = LatestGroups(max_salted, self._new)
        self._requests: dict[str, int] = {}
        self._next = 0

    def of(self, group: str | None, request_id: str) -> int:
        """Of a request's group, or of itself; the same as long as the request runs.

        Of more groups than are kept each makes another one forgotten whenever it is used.
        """
        number = self._requests.get(request_id)
        if number is None:
            number = self._new() if group is None else self._groups.of(group)
            self._requests[request_id] = number
        elif group is not None:
            self._groups.find(group)  # it is in use
        return number

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._requests.pop(request_id, None)

    def _new(self) -> int:
        self._next += 1
        return self._next
