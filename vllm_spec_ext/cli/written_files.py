# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes: refused before minutes of measuring, and written before tables."""

import errno
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_spec_ext.atomic import DiskFullError, atomic_file
from vllm_spec_ext.errors import SpecExtError

_STANDARD = {"stdin": 0, "stdout": 1, "stderr": 2}
_OPEN_FILE = re.compile(
    r"/(?:dev|proc/(?:self|thread-self|(\d+)))/fd/(\d+)|/dev/(stdin|stdout|stderr)"
)
_MOST_LINKS = 40  # as Linux


def check_writable(*paths: Path | None) -> None:
    """Raise SpecExtError for a path that cannot be written; None is none."""
    for path in filter(None, paths):
        descriptor = _descriptor(path)
        if descriptor is not None:
            if not _takes_writes(descriptor):
                raise SpecExtError(
                    f"cannot write {str(path)!r}: it is not open for writing; give another file"
                )
            continue
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

    A link stays one. What is no ordinary file (a pipe), or lies where no other can be made beside
    it, is written in place; ``/dev/stdout`` where this process stands in it.

    Raises:
        SpecExtError: It cannot be written.
    """
    content = data.encode() if isinstance(data, str) else data
    try:
        descriptor = _descriptor(path)
        if descriptor is not None:
            _write_on(descriptor, content)
        elif _replaceable(path):
            _replace(path.resolve(), content)
        else:
            path.write_bytes(content)
    except (OSError, DiskFullError) as error:
        # DiskFullError speaks of commands that go on where they stopped.
        reason = os.strerror(errno.ENOSPC) if isinstance(error, DiskFullError) else str(error)
        raise SpecExtError(
            f"cannot write {str(path)!r}: {reason}; free some space, or give another file"
        ) from error


def _descriptor(path: Path) -> int | None:
    """The number of an open file of this process, if the path is a name of one, or a link to one.

    To open it anew would empty a file to which the output goes, start at its beginning, and fail
    for a socket and where another user owns it.
    """
    name = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        match = _OPEN_FILE.fullmatch(name)
        if match is not None:
            process, number, standard = match.groups()
            if process and int(process) != os.getpid():
                return None
            return int(number) if number else _STANDARD[standard]
        if not os.path.islink(name):
            return None
        name = os.path.abspath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return None


def _takes_writes(descriptor: int) -> bool:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:  # closed
        return False


def _write_on(descriptor: int, content: bytes) -> None:
    for stream in (sys.stdout, sys.stderr):  # what was printed before comes before
        stream.flush()
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)


def _replaceable(path: Path) -> bool:
    if path.exists() and not path.is_file():
        return False
    # Open files of other processes are links to what they write.
    if path.absolute().is_relative_to("/proc"):
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
