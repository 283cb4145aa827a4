# SPDX-License-Identifier: Apache-2.0
"""One process at a time decides about a folder, and one trains in it."""

import fcntl
import os
from pathlib import Path


class FolderLock:
    """A lock on a file; it ends with its process, however that ends."""

    def __init__(self, path: Path) -> None:
        """Of a folder that is there once the lock is taken."""
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Whether it is ours, now or already.

        Raises:
            OSError: The file cannot be made, or its file system knows no locks.
        """
        if self._descriptor is not None:
            return True
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let another process have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
