# SPDX-License-Identifier: Apache-2.0
"""One process at a time decides about a folder, and one trains in it."""

import errno
import fcntl
import logging
import os
from pathlib import Path

logger = logging.getLogger("vllm.spec_ext")

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    """A lock on a file; it ends with its process, however that ends."""

    def __init__(self, path: Path) -> None:
        """Of a folder that is there once the lock is taken."""
        self._path = path
        self._descriptor: int | None = None
        self._is_over = False

    def take(self) -> bool:
        """Whether it is ours, now or already; not again once it was released.

        Where the file system knows no locks all have it, and a warning says so.

        Raises:
            OSError: The file cannot be made.
        """
        if self._is_over or self._descriptor is not None:
            return not self._is_over
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            logger.warning(
                "vllm-spec-ext: online: the file system of %s knows no locks (%s); let one server "
                "and one trainer work on it",
                self._path.parent,
                error.strerror,
            )
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let another process have it, for good."""
        self._is_over = True
        self.give_back()

    def give_back(self) -> None:
        """Let another process have it; it may be taken again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
