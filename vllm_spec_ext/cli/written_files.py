# SPDX-License-Identifier: Apache-2.0
"""Files that a command will write: refused now rather than after minutes of measuring."""

from pathlib import Path

from vllm_spec_ext.errors import SpecExtError


def check_writable(*paths: Path | None) -> None:
    """Raise SpecExtError for a path that cannot be written; None is none."""
    for path in filter(None, paths):
        if path.is_dir() or not path.parent.is_dir():
            raise SpecExtError(f"cannot write {str(path)!r}: give a file in an existing folder")
