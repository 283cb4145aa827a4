# SPDX-License-Identifier: Apache-2.0
"""The recursion of a cascade, for one request: levels write, levels above them review.

As in Cascade Speculative Drafting (Chen et al. 2023, algorithm 1): what a reviewer is to review is
written by the levels below it, from the next one down to the first, each until the text has so many
tokens; and each of those that is a reviewer itself does the same before it reviews. The target is
the last reviewer, and what is written for it is the draft.

A request is a coroutine that asks for one review after the other; who runs it
(:mod:`.round`) makes one forward pass of the reviews that many requests ask of a level.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from vllm_spec_ext.proposers.cascade.judging import Distribution, Verdict
from vllm_spec_ext.proposers.cascade.sources import Source

Writing = Generator["Review", Verdict | None, bool]


@dataclass(frozen=True)
class Rung:
    """How one level works; the first ones are methods, which review nothing."""

    is_reviewer: bool
    reviews: Sequence[int] = ()
    """Tokens that each of the levels below adds to what it reviews, from the next one down."""
    alone: bool = True  # it writes a token where they have nothing


@dataclass(frozen=True)
class Review:
    """A level is to review the text from `start` on."""

    level: int
    start: int


@dataclass(eq=False)
class Text:
    """What is written behind the verified tokens of one request."""

    root: int  # the last verified token
    num_levels: int
    tokens: list[int] = field(default_factory=list)
    drawn_from: list[Distribution] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)  # level of each token: that reviewed it last
    read: list[int] = field(init=False)
    """[num_levels] tokens that a level has read, the root included, and that still stand."""

    def __post_init__(self) -> None:
        """No level has read anything."""
        self.read = [0] * self.num_levels

    def __len__(self) -> int:
        return len(self.tokens)

    def unread(self, level: int) -> list[int]:
        """What a level has to read before it can say what comes next; never empty."""
        return [self.root, *self.tokens][self.read[level] :]

    def add(self, token: int, drawn_from: Distribution, maker: int) -> None:
        """Write one more token."""
        self.tokens.append(token)
        self.drawn_from.append(drawn_from)
        self.makers.append(maker)

    def cut(self, length: int) -> None:
        """Go back to fewer tokens."""
        for part in (self.tokens, self.drawn_from, self.makers):
            del part[length:]


class Writer:
    """Writes the draft of one request."""

    def __init__(self, rungs: Sequence[Rung], sources: Sequence[Source | None], root: int) -> None:
        """Begin with nothing.

        Args:
            rungs: [num_levels] the lowest first.
            sources: [num_levels] what the methods have; None for reviewers.
            root: The last verified token.
        """
        self._rungs = rungs
        self._sources = sources
        self.text = Text(root, len(rungs))
        self._is_lost = [False] * len(rungs)  # levels that cannot follow this request

    def write(self, numbers: Sequence[int], most: int) -> Writing:
        """Write what the target is to verify, at most so many tokens; whether there is any.

        Args:
            numbers: As :attr:`Rung.reviews`, of the target.
            most: Tokens of all levels together.
        """
        yield from self._below(len(self._rungs), numbers, most)
        return bool(self.text.tokens)

    def _below(self, level: int, numbers: Sequence[int], most: int) -> Writing:
        """Let the levels below a reviewer write for it."""
        start, wanted = len(self.text), 0
        for lower, number in zip(range(level - 1, -1, -1), numbers, strict=False):
            wanted += number
            while len(self.text) - start < min(wanted, most):
                # A review ends where it ends, so it may go further than was wanted of its level.
                end = most if self._rungs[lower].is_reviewer else min(wanted, most)
                if not (yield from self._level(lower, end - (len(self.text) - start))):
                    break
        return len(self.text) > start

    def _level(self, level: int, most: int) -> Writing:
        """Let one level write, at most so many tokens; whether it did."""
        rung = self._rungs[level]
        if not rung.is_reviewer:
            return self._guess(level, most)
        if self._is_lost[level]:
            return False
        start = len(self.text)
        found = yield from self._below(level, rung.reviews, most - 1)
        # With room for one token the levels below were not asked.
        if not found and most > 1 and rung.reviews and not rung.alone:
            return False
        verdict = yield Review(level, start)
        if verdict is None:
            self._lose(level, start)
            return False
        self._apply(level, start, verdict)
        return True

    def _guess(self, level: int, most: int) -> bool:
        source = self._sources[level]
        if source is None:
            return False
        tokens, drawn_from = source.following(self.text.tokens, most)
        for token, distribution in zip(tokens, drawn_from, strict=True):
            self.text.add(token, distribution, level)
        return bool(tokens)

    def _apply(self, level: int, start: int, verdict: Verdict) -> None:
        """The text is the reviewer's from `start` on."""
        text = self.text
        end = start + verdict.num_accepted
        text.read[level] = len(text) + 1
        text.cut(end)
        text.read = [min(read, 1 + end) for read in text.read]
        own = verdict.distributions
        for place in range(verdict.num_accepted):
            text.makers[start + place] = level
            text.drawn_from[start + place] = None if own is None else own[place]
        text.add(verdict.token, None if own is None else own[verdict.num_accepted], level)
        for source in self._sources:
            if source is not None:
                source.judged(text.tokens)

    def _lose(self, level: int, start: int) -> None:
        """A level could not read: what it was to review is not the draft's."""
        self._is_lost[level] = True
        self.text.cut(start)
        # The last token is read again by those that know it: its logits are gone.
        self.text.read = [min(read, start) for read in self.text.read]
