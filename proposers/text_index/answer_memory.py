# SPDX-License-Identifier: Apache-2.0
"""What earlier requests were answered, for later ones to copy from.

Requests made from one template get answers that open, comment and close in the same words. Every
answer stands behind a heading, so that the openings can be found too: it ends with the same
separator for all, and before that says which prompt was answered. So an answer that has not begun
agrees in one place with all others, and in more with those to the same prompt: asked again, as
evaluations, retries and rollouts do, a model mostly says what it said.

What one user was answered must not be drafted for another, as acceptance would tell: each share
group has a memory of its own.
"""

import zlib

import numpy as np

from vllm_spec_ext.proposers.base import IntArray
from vllm_spec_ext.proposers.share_groups import LatestGroups
from vllm_spec_ext.proposers.text_index.occurrence_index import Match, OccurrenceIndex

_FIRST_ROOM = 1024  # tokens; a group with few answers must not cost as much as one with many
_MOST_SAME = 32  # answers to one prompt that are known as such
NUM_MARKS = 9  # of a prompt: with the separator more than a match needs to be among the longest


def heading(prompt: IntArray, separator: int) -> IntArray:
    """[NUM_MARKS + 1] int32, none of them a token: what stands in front of a prompt's answer.

    Args:
        prompt: [n] int32 tokens.
        separator: As of :class:`AnswerMemory`.
    """
    marks = np.iinfo(np.int32).max - separator  # numbers above the separator
    found = np.full(NUM_MARKS + 1, separator, np.int32)
    found[:-1] += 1 + zlib.crc32(prompt.tobytes()) % marks
    return found


def opened(opens: IntArray, output: IntArray, most: int) -> IntArray:
    """The end, at most `most` tokens, of a heading and an output behind it."""
    if len(output) < most:
        output = np.concatenate((opens, output))
    return output[-most:]


class AnswerMemory:
    """The latest answers of one group, the oldest forgotten first."""

    def __init__(self, limit: int, separator: int) -> None:
        """Start empty.

        Args:
            limit: Most tokens that are kept.
            separator: A number that is no token, >= 0; those above are none either.
        """
        self._limit = limit
        self._separator = np.array([separator], np.int32)
        # Headings, answers as they are and folded, oldest first.
        self._entries: list[tuple[IntArray, IntArray, IntArray]] = []
        self._index = OccurrenceIndex(min(limit + 1, _FIRST_ROOM))
        self._tokens = np.empty(limit + 1, np.int32)  # of the index, not folded
        self._same: dict[int, list[tuple[int, int]]] = {}  # of each mark, the latest first
        self.num_added = 0
        """Answers that came so far; what is kept changed if this did."""

    def __len__(self) -> int:
        return len(self._index)

    def add(self, answer: IntArray, folded: IntArray, opens: IntArray) -> None:
        """Remember an answer, of a long one its end.

        Args:
            answer: [n] int32 tokens.
            folded: [n] int32 tokens as they are compared.
            opens: Its :func:`heading`.
        """
        if not len(answer):
            return
        half = max(self._limit // 2, 1)
        before = self._separator
        if len(opens) + len(answer) <= half:
            before = opens
        rest = max(half - len(before), 1)
        entry = (before, answer[-rest:], folded[-rest:])
        if len(self) + len(before) + len(entry[1]) > self._limit:
            self._keep_newest(half)
        self._entries.append(entry)
        self._append(*entry)
        self.num_added += 1

    @property
    def index(self) -> OccurrenceIndex:
        """Of all answers, each behind its heading; as they are compared."""
        return self._index

    @property
    def tokens(self) -> IntArray:
        """[len(self)] int32 all answers as they are, each behind its heading; a view."""
        return self._tokens[: len(self)]

    def same(self, opens: IntArray) -> IntArray:
        """[n, 2] int32: where answers to the same prompt begin and end, the latest ones first.

        Args:
            opens: Their :func:`heading`.
        """
        return np.array(self._same.get(int(opens[0]), ()), np.int32).reshape(-1, 2)

    def longest(self, folded: IntArray, max_ngram: int, opens: IntArray) -> Match:
        """Where the end of a request's output stood in an earlier answer.

        Args:
            folded: [m] int32, the output so far, from its first token.
            max_ngram: Most tokens that are compared.
            opens: The :func:`heading` of the answer.
        """
        return self._index.longest(opened(opens, folded, max_ngram), max_ngram)

    def following(self, match: Match, room: int) -> IntArray:
        """At most `room` tokens that came behind a match, not beyond the end of that answer."""
        tokens = self._tokens[match.latest : min(match.latest + room, len(self))]
        ends = np.flatnonzero(tokens >= self._separator)
        return tokens[: ends[0]] if len(ends) else tokens

    def _append(self, before: IntArray, answer: IntArray, folded: IntArray) -> None:
        start = len(self)
        self._index.append(np.concatenate((before, folded)))
        self._tokens[start : len(self)] = np.concatenate((before, answer))
        if len(before) > 1:
            same = self._same.setdefault(int(before[0]), [])
            same.insert(0, (start + len(before), len(self)))
            del same[_MOST_SAME:]

    def _keep_newest(self, num_tokens: int) -> None:
        """Index anew the newest answers of that many tokens together."""
        kept = []
        for entry in reversed(self._entries):
            num_tokens -= len(entry[0]) + len(entry[1])
            if num_tokens < 0:
                break
            kept.append(entry)
        self._entries = kept[::-1]
        self._same = {}
        self._index = OccurrenceIndex(len(self._index))
        for entry in self._entries:
            self._append(*entry)


class AnswerMemories:
    """One memory for each share group; of those with a salt, the latest used ones are kept."""

    def __init__(self, limit: int, max_salted: int, separator: int) -> None:
        """Start empty.

        Args:
            limit: Most tokens that are kept of each group; 0 = nothing is kept.
            max_salted: Most groups beside the one of requests without a salt.
            separator: As of :class:`AnswerMemory`.
        """
        self._limit, self._separator = limit, separator
        self._memories = LatestGroups(max_salted, lambda: AnswerMemory(limit, separator))

    def __len__(self) -> int:
        return sum(map(len, self._memories.values()))

    @property
    def num_groups(self) -> int:
        """Groups of which something is known."""
        return len(self._memories)

    def of(self, group: str | None) -> AnswerMemory | None:
        """What requests of a group may see; None if that is nothing."""
        return None if group is None else self._memories.find(group)

    def heading(self, prompt: IntArray) -> IntArray:
        """Of the answer to a prompt, see :func:`heading`."""
        return heading(prompt, self._separator)

    def add(
        self,
        group: str | None,
        answer: IntArray,
        folded: IntArray,
        opens: IntArray,
    ) -> None:
        """Remember an answer for requests of its group.

        Args:
            group: Whose answer; None = it is forgotten.
            answer: [n] int32 tokens.
            folded: [n] int32 tokens as they are compared.
            opens: As of :meth:`AnswerMemory.add`.
        """
        if group is not None and self._limit and len(answer):
            self._memories.of(group).add(answer, folded, opens)
