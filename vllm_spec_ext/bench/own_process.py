# SPDX-License-Identifier: Apache-2.0
"""A measurement in a process of its own, which gives all its memory back."""

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_spec_ext.bench.engine_client import EngineFailed, root_cause
from vllm_spec_ext.errors import SpecExtError

_SYSTEM: Any = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # Linux


def _end_with_parent() -> None:
    """A measurement must not go on, on all cores, when the command that waits for it is killed."""
    with contextlib.suppress(AttributeError):  # another system
        _SYSTEM.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def measure_apart(module: str, arguments: Sequence[str], path: Path, failure: str) -> Any:
    """Run a module that writes JSON where ``--json`` says, and read that.

    Args:
        module: Of this package; it exits with 2 after a SpecExtError.
        arguments: Of its command line, without ``--json``.
        path: Of the JSON file.
        failure: What could not be done if it ends otherwise, a clause.

    Raises:
        SpecExtError: As the module raised it.
        EngineFailed: It ended without a result.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments, "--json", str(path)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=_end_with_parent,
    )
    if done.returncode == 2:
        raise SpecExtError(done.stderr.rpartition("SpecExtError: ")[2].strip())
    if done.returncode:
        reason = root_cause(done.stderr + done.stdout) or done.stderr[-500:].strip()
        reason = reason or f"its process ended with status {done.returncode}, and said nothing"
        raise EngineFailed(f"{failure}: {reason}")
    return json.loads(path.read_text(encoding="utf-8"))
