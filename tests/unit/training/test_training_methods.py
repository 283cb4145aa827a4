# SPDX-License-Identifier: Apache-2.0
"""Training is a house for more methods: who may import whom, and how a method is found."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vllm_spec_ext.cli.train import add_method, train_app
from vllm_spec_ext.proposers.registry import BUILTIN
from vllm_spec_ext.training.registry import TRAINERS, Trainer
from vllm_spec_ext.training.schema import Training

ROOT = Path(__file__).resolve().parents[3]
TRAINING = ROOT / "vllm_spec_ext" / "training"
PACKAGE = "vllm_spec_ext.training"
PROPOSERS = "vllm_spec_ext.proposers"
METHODS = sorted(path.parent.name for path in TRAINING.glob("*/__init__.py"))


def imports_of(file: Path) -> Iterator[str]:
    """Full names of all that a file imports, also inside functions and for typing only."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def lies_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("file", sorted(TRAINING.glob("*.py")), ids=lambda file: file.name)
def test_shared_modules_import_no_method(file: Path) -> None:
    own = [f"{PACKAGE}.{method}" for method in METHODS]
    own += [f"{PROPOSERS}.{method}" for method in BUILTIN]
    found = [name for name in imports_of(file) if any(lies_in(name, folder) for folder in own)]
    assert not found


@pytest.mark.parametrize("method", METHODS)
def test_a_method_imports_shared_modules_and_its_proposer_only(method: str) -> None:
    others = [f"{PACKAGE}.{name}" for name in METHODS if name != method]
    others += [f"{PROPOSERS}.{name}" for name in BUILTIN if name != method]
    ours = [f"vllm_spec_ext.{name}" for name in ("atomic", "errors", "options", "tensor_files")]
    allowed = (PACKAGE, PROPOSERS, *ours)
    for file in (TRAINING / method).rglob("*.py"):
        for name in imports_of(file):
            if lies_in(name, "vllm_spec_ext"):
                assert any(lies_in(name, folder) for folder in allowed), (file, name)
            assert not any(lies_in(name, folder) for folder in others), (file, name)
            assert not lies_in(name, "vllm"), (file, name)


def test_every_folder_is_registered_under_its_methods_name() -> None:
    assert sorted(TRAINERS) == METHODS
    # A draft model serves several methods, vLLM's own among them; heads bear their method's name.
    assert set(METHODS) - {"draft"} <= set(BUILTIN)
    for method, trainer in TRAINERS.items():
        assert lies_in(trainer.settings.partition(":")[0], f"{PACKAGE}.{method}")
        assert issubclass(trainer.load_settings(), Training)
        assert callable(trainer.load_run())


class OtherTraining(Training):
    """A further method's settings."""

    depth: int = 3
    """Draft tokens in a row."""


SEEN: list[OtherTraining] = []


def train_other(config: OtherTraining, report: Callable[[str], None]) -> None:
    """A further method's trainer."""
    SEEN.append(config)
    report("trained")


def test_a_further_method_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Trainer(f"{__name__}:OtherTraining", f"{__name__}:train_other", "Train another one.")
    app = typer.Typer()
    for name, trainer in {**TRAINERS, "other": entry}.items():
        add_method(app, name, trainer)
    listed = CliRunner().invoke(app, ["--help"]).output
    assert "Train another one." in listed
    assert "blockwise" in listed
    SEEN.clear()
    flags = ["--model", "m", "--out", "o", "--depth", "5", "--prompts", "a.txt", "b.txt"]
    done = CliRunner().invoke(app, ["other", *flags])
    assert done.exit_code == 0, done.output
    assert "trained" in done.output
    assert SEEN[0].depth == 5
    assert SEEN[0].prompts == [Path("a.txt"), Path("b.txt")]
    assert "--num-heads" not in CliRunner().invoke(app, ["other", "--help"]).output


def test_help_lists_the_methods() -> None:
    listed = CliRunner().invoke(train_app, ["--help"]).output
    assert all(method in listed for method in TRAINERS)


def run_module(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_runs_as_a_module(method: str) -> None:
    """As documented for machines without typer."""
    done = run_module("-m", f"{PACKAGE}.{method}", "--model", "m")
    assert done.returncode == 2, done.stderr
    assert "needs --out" in done.stderr


def test_help_loads_no_torch() -> None:
    done = run_module(
        "-c", "import sys, vllm_spec_ext.cli.train; assert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr
