# SPDX-License-Identifier: Apache-2.0
"""Files that the system does not let a process read; for root, too, whom no permission stops."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_spec_ext.errors import SpecExtError


def make_unreadable(path: Path) -> None:
    """Put a file in its place that can be opened, and fails as a disk does when it is read."""
    path.unlink()
    path.symlink_to("/proc/self/mem")  # whose first page nothing has


@contextmanager
def said_to_be_unreadable(path: Path) -> Iterator[None]:
    """The block refuses the file with the system's reason, and tells nobody to replace it."""
    words = rf"{re.escape(str(path))} cannot be read: Input/output error"
    with pytest.raises(SpecExtError, match=words) as found:
        yield
    assert not re.search("damaged|delete|copy|download|train", str(found.value).split(path.name)[1])
