# SPDX-License-Identifier: Apache-2.0
"""Where a command's engines write what they say, as long as somebody may want to read it."""

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from vllm_spec_ext.bench.engine_client import EngineFailed
from vllm_spec_ext.errors import SpecExtError


class LogFolder:
    """A folder that is gone behind the command, unless it was named, or an engine failed.

    The message of a failed engine names its log.
    """

    def __init__(self, command: str, given: Path | None = None) -> None:
        """Make it.

        Args:
            command: Part of its name.
            given: The user's own, which stays.
        """
        self.path = given or Path(tempfile.mkdtemp(prefix=f"vllm-spec-{command}-"))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecExtError(f"--log-dir {given}: {error}; expected a folder") from error
        self._stays = given is not None

    def keep(self) -> None:
        """An engine failed, and the command goes on."""
        self._stays = True

    def __enter__(self) -> Self:
        """For the time of the command."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove it, or not."""
        if not self._stays and not isinstance(error, EngineFailed):
            shutil.rmtree(self.path, ignore_errors=True)
