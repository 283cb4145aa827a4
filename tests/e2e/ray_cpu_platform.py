# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with the key that Ray's executor asks for; for tests without GPUs.

A cluster started with ``--num-gpus 2`` hands out two "GPUs" that nobody touches.
"""

from pathlib import Path

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """CPUs that Ray counts as GPUs."""

    ray_device_key = "GPU"


def platform() -> str:
    """The entry point."""
    return f"{__name__}.{RayCpuPlatform.__name__}"


def install(folder: Path) -> None:
    """Make this module a plugin of vLLM for processes with the folder on ``PYTHONPATH``."""
    (folder / f"{__name__}.py").write_text(Path(__file__).read_text())
    metadata = folder / f"{__name__}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {__name__}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.platform_plugins]\n{__name__} = {__name__}:{platform.__name__}\n"
    )
