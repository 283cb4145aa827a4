# SPDX-License-Identifier: Apache-2.0
"""What a cascade of drafters gains on paper: tokens a step, and seconds, from acceptance alone.

A level drafts for the level above it; the target is the top one. A level that is a model reviews
what its inner level drafts: one forward pass over that chunk gives the accepted tokens and one of
its own, and rounds go on until it has as many tokens as it was asked for (CS-Drafting, Chen et al.
2023, vertical; TriForce, Sun et al. 2024, algorithm 1). Levels may also follow each other: the
first tokens of a draft from one, its tail from another (CS-Drafting, horizontal).

approximation: tokens are accepted independently, at a rate that does not depend on the text or on
how long the draft is. Real acceptance comes in runs, so long drafts gain a little less.

No engine and no GPU is needed; what a forward pass costs comes from :mod:`.gpu_costs` or from
anything else that can be called with a number of rows.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

ForwardTime = Callable[[int], float]
"""Rows of a forward pass, over all requests of the batch -> its seconds."""


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens of a step whose draft tokens are accepted at these rates, bonus token included.

    Args:
        acceptance: For each position of the draft, the probability that it is accepted if all
            before it are.
    """
    return 1.0 + sum(itertools.accumulate(acceptance, operator.mul))


@lru_cache(maxsize=4096)
def review_rounds(acceptance: tuple[float, ...], wanted: int, batch_size: int) -> tuple[float, ...]:
    """How many rounds a level takes to get the tokens that it was asked for.

    In a round a request with n of ``wanted`` tokens drafts a chunk of at most ``wanted - n - 1``
    and gets the accepted ones and one more, so it never has more than were asked for. Requests of a
    batch take part in a round as long as any of them lacks tokens; those that are done sit out.

    Args:
        acceptance: By position, of the chunk that the inner level drafts; empty without one.
        wanted: Tokens that each request is to get.
        batch_size: Requests in a round.

    Returns:
        For each chunk length from 0 to ``len(acceptance)``, the expected number of rounds in which
        the longest chunk of the batch has that length. Their sum is the expected number of rounds.
    """
    counts = [0.0] * (len(acceptance) + 1)
    have = {0: 1.0}  # tokens of a request -> probability; requests are independent and alike
    while have.keys() - {wanted}:
        # Chunks by length, and at the end the chance that a request lacks none.
        sizes = [0.0] * (len(counts) + 1)
        after: dict[int, float] = {}
        for n, chance in have.items():
            if n == wanted:
                sizes[-1] += chance
                after[n] = after.get(n, 0.0) + chance
                continue
            chunk = min(len(acceptance), wanted - n - 1)
            sizes[chunk] += chance
            reached = 1.0  # the chance that so many of the chunk are accepted
            for accepted in range(chunk + 1):
                goes_on = acceptance[accepted] if accepted < chunk else 0.0
                stop = n + accepted + 1
                after[stop] = after.get(stop, 0.0) + chance * reached * (1.0 - goes_on)
                reached *= goes_on
        below = sizes[-1]  # the chance that a request has no longer chunk, and of all of them
        before = below**batch_size
        for chunk, chance in enumerate(sizes[:-1]):
            below += chance
            counts[chunk] += below**batch_size - before
            before = below**batch_size
        have = {n: chance for n, chance in after.items() if chance > 0.0}
    return tuple(counts)


class Drafter(Protocol):
    """Something that drafts chains of tokens, of each request of a batch one."""

    def acceptance(self, num_tokens: int) -> tuple[float, ...]:
        """Of a chain of so many tokens, by position, under the level that asked for it."""

    def seconds(self, num_tokens: int, batch_size: int) -> float:
        """Expected time to draft it, for the whole batch."""


@dataclass(frozen=True)
class Lookup:
    """Tokens found, not computed: n-grams, copies of the input, a corpus.

    approximation: there is always something to draft; fold the cases without into ``rate``.
    """

    rate: float
    request_s: float = 0.0  # of one request's draft

    def acceptance(self, num_tokens: int) -> tuple[float, ...]:
        """The same everywhere."""
        return (self.rate,) * num_tokens

    def seconds(self, num_tokens: int, batch_size: int) -> float:
        """However many tokens."""
        return self.request_s * batch_size if num_tokens else 0.0


@dataclass(frozen=True)
class Model:
    """A model that drafts: a small one, or the target over a view of its KV cache."""

    rate: float
    forward_s: ForwardTime
    inner: Drafter | None = None
    chunk: int = 0  # most tokens of the inner level that one pass reviews

    def acceptance(self, num_tokens: int) -> tuple[float, ...]:
        """Whoever drafted a token first, it is this model's own: reviews keep its distribution."""
        return (self.rate,) * num_tokens

    def seconds(self, num_tokens: int, batch_size: int) -> float:
        """Token by token, or in rounds of review.

        approximation: every request of a round counts with as many rows as the longest chunk has.
        """
        reviewed = () if self.inner is None else self.inner.acceptance(self.chunk)
        total = 0.0
        for chunk, rounds in enumerate(review_rounds(reviewed, num_tokens, batch_size)):
            if rounds:
                drafting = 0.0 if self.inner is None else self.inner.seconds(chunk, batch_size)
                total += rounds * (drafting + self.forward_s(batch_size * (chunk + 1)))
        return total


@dataclass(frozen=True)
class InTurn:
    """The first tokens from one level, those behind them from the next (horizontal cascade)."""

    parts: tuple[tuple[Drafter, int], ...]  # the last one's number is a limit, too

    def acceptance(self, num_tokens: int) -> tuple[float, ...]:
        """By position; a chain is no longer than its parts together."""
        return tuple(
            rate for part, taken in self._split(num_tokens) for rate in part.acceptance(taken)
        )

    def seconds(self, num_tokens: int, batch_size: int) -> float:
        """One part after the other."""
        return sum(part.seconds(taken, batch_size) for part, taken in self._split(num_tokens))

    def _split(self, num_tokens: int) -> list[tuple[Drafter, int]]:
        found = []
        for part, most in self.parts:
            taken = min(most, num_tokens)
            num_tokens -= taken
            found.append((part, taken))
        return found


@dataclass(frozen=True)
class Step:
    """One step of the target, as expected."""

    num_drafted: int
    tokens: float  # bonus token included
    drafting_s: float
    verify_s: float

    @property
    def seconds(self) -> float:
        """Drafting and verification."""
        return self.drafting_s + self.verify_s


def step_of(
    drafter: Drafter,
    num_tokens: int,
    batch_size: int,
    target_s: ForwardTime,
    once_s: float = 0.0,
) -> Step:
    """A step in which each request's draft has so many tokens.

    Args:
        drafter: The level below the target.
        num_tokens: Wanted of it; it may have fewer to give.
        batch_size: Requests in the step.
        target_s: A forward pass of the target.
        once_s: Seconds of drafting that come once a step, e.g. choosing the pages of a view.
    """
    acceptance = drafter.acceptance(num_tokens)
    return Step(
        num_drafted=len(acceptance),
        tokens=expected_tokens(acceptance),
        drafting_s=drafter.seconds(len(acceptance), batch_size) + once_s,
        verify_s=target_s(batch_size * (len(acceptance) + 1)),
    )
