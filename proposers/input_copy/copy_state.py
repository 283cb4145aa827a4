# SPDX-License-Identifier: Apache-2.0
"""Where one request's copying stands."""

from dataclasses import dataclass, field
from typing import NamedTuple, Self

from vllm_spec_ext.proposers.base import IntArray
from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex

LOST = -1


@dataclass
class CopyState:
    """State of one request. The indices hold folded tokens, `source` the tokens as they are."""

    source: IntArray  # [n] int32
    source_index: OccurrenceIndex
    output_index: OccurrenceIndex
    remember: bool  # the answer, for later requests of the group
    share_group: str | None
    heading: IntArray  # of the answer, as earlier ones have theirs
    source_start: int | None  # of the source in the prompt; None = it is not a part of that
    is_sayable: bool  # the model can say all of the source's tokens
    output: list[int] = field(default_factory=list)  # tokens as they are
    cursor: int = 0  # next source token to draft; LOST while the output is not in the source
    num_agreeing: int = 0  # output tokens that led to the cursor
    lost_at: int = LOST  # where the cursor stood when copying stopped
    num_lost: int = 0  # tokens since then
    guessing: bool = False  # the cursor is a guess that no accepted token has confirmed yet
    kind: int = 0  # of the last draft, for its outcome
    num_before: int = 0  # tokens that agree before the last draft

    def follow(self, tokens: IntArray) -> None:
        """Move the cursor over new, folded output tokens as long as they are the source's."""
        source = self.source_index.tokens
        for token in tokens.tolist():
            if 0 <= self.cursor < len(source) and source[self.cursor] == token:
                self.cursor += 1
                self.num_agreeing += 1
                self.guessing = False
                continue
            if self.cursor != LOST and not self.guessing:
                self.lost_at, self.num_lost = self.cursor, 0
            self.cursor, self.guessing, self.num_agreeing = LOST, False, 0
            self.num_lost += 1


class LateState(NamedTuple):
    """What is known of a copy where its last tokens are not: older than the text."""

    num_known: int  # output tokens that it was made of
    cursor: int = 0
    num_agreeing: int = 0
    lost_at: int = LOST
    num_lost: int = 0
    guessing: bool = False

    @classmethod
    def of(cls, copy: CopyState) -> Self:
        """As it stands."""
        return cls(
            len(copy.output),
            copy.cursor,
            copy.num_agreeing,
            copy.lost_at,
            copy.num_lost,
            copy.guessing,
        )
