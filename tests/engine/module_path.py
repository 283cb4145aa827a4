# SPDX-License-Identifier: Apache-2.0
"""Other Python modules in front of those that are installed."""

import os
import sys
from collections.abc import Sequence


def put_first(folders: Sequence[str], *, before: Sequence[str]) -> None:
    """For this process and those that it spawns.

    Args:
        folders: Where the modules are.
        before: Modules that may not have been imported yet.

    Raises:
        ImportError: One of them was: the tests need a process of their own.
    """
    found = [name for name in before if name in sys.modules]
    if found:
        raise ImportError(
            f"found {', '.join(found)} imported, expected none yet: run pytest on the folders and "
            "files of these tests alone"
        )
    sys.path[:0] = folders
    paths = [*folders, os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
