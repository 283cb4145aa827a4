# SPDX-License-Identifier: Apache-2.0
"""Reading files of tensors: one that cannot be read is told from one that is damaged."""

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_spec_ext.atomic import not_readable
from vllm_spec_ext.errors import SpecExtError


def check_readable(path: Path, kind: str = "", *, may_be_missing: bool = False) -> None:
    """Refuse a file that the system does not let this process read.

    safetensors (0.8) says of every file that it cannot open that there is none, so this asks first.

    Args:
        path: The file.
        kind: What stands before its name in the message.
        may_be_missing: A file that is not there is passed over.

    Raises:
        SpecExtError: With the system's reason. The file may be whole: nobody should delete it.
    """
    try:
        with open(path, "rb") as file:
            file.read(1)  # a disk that fails lets it be opened
    except OSError as error:
        if not (may_be_missing and isinstance(error, FileNotFoundError)):
            raise SpecExtError(f"{kind}{path} {not_readable(error)}") from error


def check_all_readable(folder: Path, names: Iterable[str]) -> None:
    """As :func:`check_readable`, for those files of a folder that are there."""
    for name in names:
        check_readable(folder / name, may_be_missing=True)


@contextmanager
def reading(path: Path, advice: str, kind: str = "") -> Iterator[None]:
    """A block in which safetensors reads a file.

    Args:
        path: The file.
        advice: What to do about a damaged one; the end of a sentence.
        kind: As of :func:`check_readable`.

    Raises:
        SpecExtError: As of :func:`check_readable`; or the file is damaged.
    """
    from safetensors import SafetensorError

    check_readable(path, kind)
    try:
        yield
    except OSError as error:
        raise SpecExtError(f"{kind}{path} {not_readable(error)}") from error
    except (SafetensorError, struct.error) as error:
        raise SpecExtError(f"{kind}{path} is damaged ({error}); {advice}") from error
