# SPDX-License-Identifier: Apache-2.0
"""Files are whole or not there: with several writers, and on a full disk."""

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pytest

from vllm_spec_ext.atomic import DiskFullError, atomic_file, whole_file, write_bytes

Writing = Callable[[Path], AbstractContextManager[BinaryIO]]


@pytest.mark.parametrize("write", [atomic_file, whole_file])
def test_two_writers_of_one_file_do_not_meet(write: Writing, tmp_path: Path) -> None:
    """Two threads, or containers of one disk whose processes have the same number."""
    path = tmp_path / "file"
    with write(path) as slow:
        slow.write(b"slow")
        with write(path) as fast:
            fast.write(b"fast, and longer")
        assert path.read_bytes() == b"fast, and longer"
    assert path.read_bytes() == b"slow"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("write", [atomic_file, whole_file])
def test_what_fails_changes_nothing(write: Writing, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"former")
    with pytest.raises(TypeError), write(path) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert path.read_bytes() == b"former"
    assert os.listdir(tmp_path) == ["file"]


def test_each_has_its_error_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), whole_file(tmp_path / "file"):
        pass
    with pytest.raises(DiskFullError, match="it goes on where it stopped"):
        write_bytes(tmp_path / "file", b"")
    assert not os.listdir(tmp_path)


def test_who_may_read_it(tmp_path: Path) -> None:
    former = os.umask(0o022)
    try:
        with whole_file(tmp_path / "own", 0o600), whole_file(tmp_path / "all"):
            pass
    finally:
        os.umask(former)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"own": 0o600, "all": 0o644}
