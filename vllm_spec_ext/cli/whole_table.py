# SPDX-License-Identifier: Apache-2.0
"""Tables that are never cut: drawn where they fit, with columns for rows where only that fits.

Else, and in a pipe, they are Markdown with a line for each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from vllm_spec_ext.bench.markdown_table import markdown_table

Cell = str | Text  # a text is shown as it is, without markup


@dataclass(frozen=True)
class WholeTable:
    """Headings and cells, to be shown on whatever standard output is."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    left: int = 1
    """So many columns at the left hold words; those to their right hold figures."""
    wrap: bool = False
    """Cells of words may be broken into lines; figures never are."""

    def on(self, console: Console) -> Table | Text:
        """What to print: a drawn table on a terminal that is wide enough, else Markdown."""
        ways = [self] if self.wrap or len(self.headings) < 3 else [self, self._turned()]
        for way in ways if console.is_terminal else ():
            drawn = way._drawn()
            needed = Measurement.get(console, console.options.update(max_width=10_000), drawn)
            if (needed.minimum if self.wrap else needed.maximum) <= console.width:
                return drawn
        return Text(self.markdown(), overflow="fold")

    def markdown(self) -> str:
        """Title and table, one line a row."""
        rows = [["; ".join(str(cell).splitlines()) for cell in row] for row in self.rows]
        table = markdown_table(self.headings, rows)
        return f"{self.title}\n\n{table}" if self.title else table

    def print(self, console: Console) -> None:
        """Print it, and break no line of Markdown: a narrow terminal does that by itself."""
        shown = self.on(console)
        if self.title and isinstance(shown, Text):
            console.print()  # right below another table, a title would be its last row
        console.print(shown, soft_wrap=isinstance(shown, Text))

    def _turned(self) -> "WholeTable":
        """A line for each column."""
        first, *others = zip(self.headings, *self.rows, strict=True)
        return WholeTable([str(cell) for cell in first], others, self.title)

    def _drawn(self) -> Table:
        box = SIMPLE_HEAD if self.wrap else HEAVY_HEAD
        table = Table(title=self.title or None, title_justify="left", box=box)
        for number, heading in enumerate(self.headings):
            words = number < self.left
            table.add_column(
                heading,
                justify="left" if words else "right",
                no_wrap=not (words and self.wrap),
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
        return table
