# SPDX-License-Identifier: Apache-2.0
"""Progress of work in stages, as bars on the terminal."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``; the unit is the stage's own, 0 of 0 = unknown."""


@contextmanager
def stage_bars(titles: Mapping[str, str]) -> Iterator[Progress]:
    """Show a bar on standard error for each stage that is reported; earlier ones are complete.

    Where that is no terminal, a line for each stage, when it begins.

    Args:
        titles: Stage -> text before its bar.
    """
    columns = (TextColumn("{task.description:34}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        started: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in started:
                if not console.is_terminal:
                    console.print(titles[stage], markup=False, highlight=False)
                _finish(started.values())
                started[stage] = bars.add_task(titles[stage], total=total or None)
            bars.update(started[stage], total=total or None, completed=done)

        def _finish(tasks: Iterable[TaskID]) -> None:
            for task in tasks:
                bars.update(task, total=1, completed=1)
                bars.stop_task(task)

        yield show
        _finish(started.values())
