# SPDX-License-Identifier: Apache-2.0
"""Files that are either whole or not there, whatever happens while they are written."""

import errno
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from vllm_spec_ext.errors import SpecExtError

PARTIAL = ".partial"
"""How names of unfinished files end; the whole name of a folder of several of them."""

_ABANDONED_S = 3600.0  # since a file was written to


class DiskFullError(SpecExtError):
    """No space left; the file that was to be replaced still has its former content."""


@contextmanager
def disk_full_named(path: Path) -> Iterator[None]:
    """Turn "no space left" in the block, whichever library says it, into DiskFullError."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        # safetensors has an error of its own, which carries the system's words only.
        if not full and os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise DiskFullError(
            f"disk full while writing {path}; everything written before is intact. Free some "
            "space and run the same command again: it goes on where it stopped"
        ) from error


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A binary file that appears under ``path`` only when the block ends without an error.

    Several threads, processes and machines may write one at a time; the last one stays.

    Args:
        path: Its folder is made if missing.
        mode: Who may do what with it, but for what the umask takes away.

    Raises:
        OSError: As the system says it; nothing has changed on disk.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """As :func:`whole_file`, for commands that go on where they stopped.

    What processes that were killed left of it more than an hour ago is removed.

    Raises:
        DiskFullError: No space (or quota) left; nothing has changed on disk.
    """
    with disk_full_named(path):
        remove_partials(path.parent, path.name, _ABANDONED_S)
        with whole_file(path) as file:
            yield file


def remove_partials(root: Path, name: str, min_age_s: float = 0.0) -> None:
    """Delete what processes that were killed left behind of a file or folder.

    Args:
        root: Where it is.
        name: Of it, from there; may have ``*`` for its last part.
        min_age_s: Seconds; younger ones stay, where other processes may be writing.
    """
    folder, last = (root / name).parent, Path(name).name
    for partial in folder.glob(f".{last}.*{PARTIAL}"):
        if min_age_s and time.time() - _changed_at(partial) < min_age_s:
            continue
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has deleted it
        return math.inf


@contextmanager
def new_files(folder: Path, last: str, former: Sequence[str] = ()) -> Iterator[Path]:
    """A folder whose files take their places in another one when the block ends without an error.

    Args:
        folder: May not be there; other files in it stay.
        last: The file without which the folder is taken for nothing: it goes first and comes last.
        former: Others that are removed.

    Raises:
        DiskFullError: All is as before.
    """
    made = folder / PARTIAL
    shutil.rmtree(made, ignore_errors=True)
    try:
        with disk_full_named(folder):
            yield made
            for name in (last, *former):
                (folder / name).unlink(missing_ok=True)
            files = [path for path in made.rglob("*") if path.is_file()]
            for path in sorted(files, key=lambda path: path.name == last):
                place = folder / path.relative_to(made)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, place)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def replace_folder(new: Path, folder: Path) -> None:
    """Move a folder into the place of another, which is deleted once that is done.

    Args:
        new: On the same file system.
        folder: No link, and no mount point; may not be there.

    Raises:
        OSError: Both are as before.
    """
    former = folder.with_name(f".{folder.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    try:
        new.rename(folder)
    except OSError:
        if former.exists():
            former.rename(folder)
        raise
    shutil.rmtree(former, ignore_errors=True)


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Replace a file's content at once; raises as :func:`atomic_file`."""
    with atomic_file(path) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file at once; raises as :func:`atomic_file`."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def not_readable(error: OSError) -> str:
    """What to say of a file that may be whole: nobody should delete it for that."""
    return (
        f"cannot be read: {error.strerror or error}; expected a file that this process may read. "
        "Mend its permissions or its disk, and run again"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        SpecExtError: Not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecExtError(f"{path} is damaged: {error}; delete it and run again") from error
    if not isinstance(value, dict):
        raise SpecExtError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
