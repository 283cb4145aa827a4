# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes: refused before minutes of measuring, and written before tables."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_spec_ext.errors import SpecExtError


def check_writable(*paths: Path | None) -> None:
    """Raise SpecExtError for a path that cannot be written; None is none."""
    for path in filter(None, paths):
        folder = path.parent
        if path.is_dir() or not folder.is_dir():
            raise SpecExtError(f"cannot write {str(path)!r}: give a file in an existing folder")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise SpecExtError(f"cannot write {str(path)!r}: you may not; give another file")


@contextmanager
def printed_last(print_tables: Callable[[], None]) -> Iterator[None]:
    """Print behind what the block writes: who reads the tables may have gone by then.

    And print in any case: a disk that is full must not cost the figures.
    """
    try:
        yield
    finally:
        print_tables()
