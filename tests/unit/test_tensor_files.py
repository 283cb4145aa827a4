# SPDX-License-Identifier: Apache-2.0
"""What is said of files of tensors that are missing, damaged, or not to be read."""

import builtins
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from unreadable_files import make_unreadable, said_to_be_unreadable

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.tensor_files import check_all_readable, reading


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file({"a": np.zeros(3)}, path)
    return path


def test_whole_files_are_read(file: Path) -> None:
    with reading(file, "delete it"):
        assert list(load_file(file)) == ["a"]


@pytest.mark.parametrize("left", [0, 7, 40])
def test_damaged_ones_are_called_so(left: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:left])
    with (
        pytest.raises(SpecExtError, match=r"heads .*safetensors is damaged \(.*\); delete it$"),
        reading(file, "delete it", "heads "),
    ):
        load_file(file)


def test_those_that_cannot_be_read_are_not(file: Path) -> None:
    make_unreadable(file)
    with said_to_be_unreadable(file), reading(file, "delete it"):
        load_file(file)
    with said_to_be_unreadable(file):
        check_all_readable(file.parent, ["missing", file.name])


def test_a_permission_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors would say that there is no such file."""

    def refuse(path: Path, *_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(builtins, "open", refuse)
    words = "cannot be read: Permission denied; expected a file"
    with pytest.raises(SpecExtError, match=words), reading(file, "delete it"):
        load_file(file)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    words = "cannot be read: Is a directory"
    with pytest.raises(SpecExtError, match=words), reading(tmp_path, "delete it"):
        load_file(tmp_path)


def test_what_the_system_says_while_it_is_read_counts_too(file: Path) -> None:
    """A disk that fails behind the first byte."""
    words = "cannot be read: Input/output error"
    with pytest.raises(SpecExtError, match=words), reading(file, "delete it"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_files_in_a_folder_that_may_not_be_searched_are_not_called_missing(tmp_path: Path) -> None:
    """A long name fails at the look, too, where no permission stops the one who tests."""
    names = ["missing", "n" * 300]
    with pytest.raises(SpecExtError, match=r"nnn cannot be read: File name too long"):
        check_all_readable(tmp_path, names)
