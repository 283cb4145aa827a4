# SPDX-License-Identifier: Apache-2.0
"""Tokens of steps in which the proposer rests; it gets them with those of a later step."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple


class UnreadSteps(NamedTuple):
    """Steps in a row with the same requests, each of which got one token in each of them."""

    num_steps: int
    num_requests: int
    places: Mapping[str, int]  # of the requests that are still there: their row


class UnreadTokens:
    """Of the requests of a batch that stays as it is."""

    def __init__(self) -> None:
        """Nothing is unread."""
        self._batch: Sequence[str] = ()
        self._tokens: dict[str, list[int]] = {}
        self._num_steps = 0

    def can_take(self, batch: Sequence[str], new_tokens: Sequence[Sequence[int]]) -> bool:
        """Whether the step only went on with the requests of the last one that was read.

        Args:
            batch: Names of the requests.
            new_tokens: [num_requests] of the step; none in an unfinished prefill.
        """
        return batch == self._batch and all(len(tokens) == 1 for tokens in new_tokens)

    def take(self, new_tokens: Sequence[Sequence[int]]) -> None:
        """Keep the tokens of such a step."""
        self._num_steps += 1
        for name, tokens in zip(self._batch, new_tokens, strict=True):
            self._tokens.setdefault(name, []).extend(tokens)

    def begin_reading(self, batch: Sequence[str]) -> UnreadSteps:
        """A step is read, with all that is unread of its requests.

        Returns:
            The steps that went by before it.
        """
        num_steps, before = self._num_steps, self._batch
        self._batch, self._num_steps = batch, 0
        if not num_steps:
            return UnreadSteps(0, len(before), {})
        whole = {
            name: place
            for place, name in enumerate(before)
            if len(self._tokens.get(name, ())) == num_steps
        }
        return UnreadSteps(num_steps, len(before), whole)

    @property
    def names(self) -> Collection[str]:
        """Of requests with tokens of steps that were not read."""
        return self._tokens if self._num_steps else ()

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether the last step was not read, and gave a token to any of these requests."""
        return self._num_steps > 0 and any(name in self._tokens for name in names)

    def pop(self, name: str) -> list[int]:
        """What is unread of a request; each of these tokens is of another step."""
        return self._tokens.pop(name, [])

    def forget(self, names: Iterable[str]) -> int:
        """Requests that are gone; how many of their last tokens are never read."""
        return sum(len(self.pop(name)) for name in names)
