# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes: refused before minutes of measuring, and written before tables."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_spec_ext.atomic import DiskFullError, atomic_file
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


def write_result(path: Path, data: str | bytes) -> None:
    """Write a file whole or not at all: a full disk must not cost the former result, too.

    A link stays one. What is no ordinary file (a pipe, ``/dev/stdout``), or lies where no other can
    be made beside it, is written in place.

    Raises:
        SpecExtError: It cannot be written.
    """
    content = data.encode() if isinstance(data, str) else data
    try:
        if _replaceable(path):
            _replace(path.resolve(), content)
        else:
            path.write_bytes(content)
    except (OSError, DiskFullError) as error:
        # DiskFullError speaks of commands that go on where they stopped.
        reason = os.strerror(errno.ENOSPC) if isinstance(error, DiskFullError) else str(error)
        raise SpecExtError(
            f"cannot write {str(path)!r}: {reason}; free some space, or give another file"
        ) from error


def _replaceable(path: Path) -> bool:
    if path.exists() and not path.is_file():
        return False
    # `/dev/stdout` is a link to the file that the output goes to, which has more in it.
    if path.absolute().is_relative_to("/dev") or path.absolute().is_relative_to("/proc"):
        return False
    return os.access(path.resolve().parent, os.W_OK)


def _replace(path: Path, content: bytes) -> None:
    try:
        with atomic_file(path) as file:
            if path.exists():
                shutil.copymode(path, file.name)
            file.write(content)
    except OSError as error:
        # Mounted by itself into a container, or another's in a folder like /tmp.
        if error.errno not in (errno.EBUSY, errno.EPERM, errno.EACCES):
            raise
        path.write_bytes(content)
