# SPDX-License-Identifier: Apache-2.0
"""Versions of a drafter: numbered folders, whole or not there, with the hash of every file.

``versions/v00000003/`` holds the files that the method serves and ``version.json``: their SHA-256,
the drafter that they descend from, and how they were trained. Version 0 is that drafter itself.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_spec_ext.atomic import disk_full_named, write_bytes, write_json
from vllm_spec_ext.errors import SpecExtError

VERSIONS = "versions"
_FACTS = "version.json"
_NAME = re.compile(r"v(\d{8})")


class VersionFacts(BaseModel):
    """``version.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    number: int = Field(ge=0)
    drafter: str
    """Hash of the weights that version 0 has; another drafter's versions are foreign."""
    sha256: dict[str, str]
    """Of each file, by name."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Steps, data and figures; for people."""


def drafter_hash(files: Mapping[str, bytes]) -> str:
    """What identifies a drafter: its files' content, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}:{len(files[name])}:".encode())
        digest.update(files[name])
    return digest.hexdigest()[:16]


def version_folder(root: Path, number: int) -> Path:
    """Where a version is."""
    return root / VERSIONS / f"v{number:08d}"


def version_numbers(root: Path) -> list[int]:
    """Versions that are there, ascending."""
    found = (_NAME.fullmatch(path.name) for path in (root / VERSIONS).glob("v*"))
    return sorted(int(match[1]) for match in found if match is not None)


def write_version(
    root: Path,
    number: int,
    files: Mapping[str, bytes],
    drafter: str,
    training: Mapping[str, Any] | None = None,
) -> Path:
    """Publish a version: its folder appears when all of it is on disk.

    Raises:
        DiskFullError: Nothing has appeared.
        SpecExtError: The number is taken.
    """
    final = version_folder(root, number)
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    if final.exists():
        raise SpecExtError(f"{final} exists; only one trainer may work on a folder")
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    facts = VersionFacts(
        number=number, drafter=drafter, sha256=hashes, training=dict(training or {})
    )
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk_full_named(final):
            for name, data in files.items():
                write_bytes(partial / name, data)
            write_json(partial / _FACTS, facts.model_dump())
            os.rename(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def check_version(root: Path, number: int, drafter: str) -> Path:
    """The folder of a version that is whole and this drafter's.

    Raises:
        SpecExtError: It is missing, damaged, or another drafter's.
    """
    folder = version_folder(root, number)
    try:
        facts = VersionFacts.model_validate_json((folder / _FACTS).read_bytes())
        if facts.number != number:
            raise SpecExtError(f"{folder} says that it is version {facts.number}")
        if facts.drafter != drafter:
            raise SpecExtError(
                f"{folder} descends from another drafter ({facts.drafter}, expected {drafter})"
            )
        for name, expected in facts.sha256.items():
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            if found != expected:
                raise SpecExtError(f"{folder / name} is damaged: its SHA-256 is not the recorded")
    except (OSError, ValidationError) as error:
        raise SpecExtError(f"{folder} is no whole version: {error}") from error
    return folder


def prune_versions(root: Path, keep: Collection[int | None], most: int) -> None:
    """Delete the oldest versions but for some, until `most` are left."""
    numbers = version_numbers(root)
    for number in numbers:
        if len(numbers) <= most:
            return
        if number not in keep:
            shutil.rmtree(version_folder(root, number), ignore_errors=True)
            numbers = [other for other in numbers if other != number]
