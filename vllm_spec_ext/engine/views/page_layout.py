# SPDX-License-Identifier: Apache-2.0
"""What a view shows of a request, in pages; a page is a KV block of the request.

Pages in sight stand in the table in the order of the text, the page that is being written last:
attention is causal by the place in the table, and keys carry their true positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.views import ViewKind, ViewSpec

Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class PartialSight:
    """What is shown of one request: its first pages, chosen ones, and all from a page on."""

    num_sink: int
    num_chosen: int  # of the pages in between
    recent_start: int  # page

    @property
    def num_hidden(self) -> int:
        """Pages that are not in sight."""
        return self.recent_start - self.num_sink - self.num_chosen


@dataclass(frozen=True)
class PageBudget:
    """A view in pages."""

    kind: ViewKind
    num_sink: int
    num_chosen: int
    num_recent: int

    @classmethod
    def of(cls, spec: ViewSpec, block_size: int) -> "PageBudget":
        """Round a view's tokens up to pages of this size; at least one page is chosen, or recent.

        Args:
            spec: Of the view.
            block_size: Tokens a page.
        """
        total, sink, recent = (
            -(-tokens // block_size) for tokens in (spec.budget, spec.sink, spec.recent)
        )
        if spec.kind == "stream":
            return cls(spec.kind, sink, 0, max(1, total - sink))
        return cls(spec.kind, sink, max(1, total - sink - recent), recent)

    @property
    def num_pages(self) -> int:
        """Full pages in sight, beside the one that is being written."""
        return self.num_sink + self.num_chosen + self.num_recent

    @property
    def most_growth(self) -> int:
        """Pages that may come into sight behind a choice of pages before another is made."""
        return max(1, self.num_pages // 4)

    def sight(self, num_full: int) -> PartialSight | None:
        """What is shown of a request with so many full pages; None = everything."""
        if self.kind == "full" or num_full <= self.num_pages:
            return None
        return PartialSight(self.num_sink, self.num_chosen, num_full - self.num_recent)

    def seen(self, length: int, block_size: int) -> int:
        """Tokens in sight of a request of this length."""
        num_full = max(0, length - 1) // block_size  # the last token is not read yet
        sight = self.sight(num_full)
        return length if sight is None else length - sight.num_hidden * block_size


def view_tables(
    tables: Int32s, widths: Sequence[int], sights: Sequence[PartialSight | None]
) -> Int32s:
    """[n, view_width] blocks in sight, zeros where pages are yet to be chosen.

    Args:
        tables: [n, width] all blocks of each request.
        widths: [n] columns of each that are used.
        sights: What each request shows; None = everything.
    """
    hidden = [0 if sight is None else sight.num_hidden for sight in sights]
    lengths = [width - less for width, less in zip(widths, hidden, strict=True)]
    result = np.zeros((len(tables), max(lengths, default=0)), np.int32)
    for row, (sight, length) in enumerate(zip(sights, lengths, strict=True)):
        if sight is None:
            result[row, :length] = tables[row, :length]
            continue
        first, tail = sight.num_sink, sight.num_sink + sight.num_chosen
        result[row, :first] = tables[row, :first]
        result[row, tail:length] = tables[row, sight.recent_start : widths[row]]
    return result
