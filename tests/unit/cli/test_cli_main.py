# SPDX-License-Identifier: Apache-2.0
"""The command table, and what errors look like from outside."""

import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import typer

from vllm_spec_ext.cli import main as cli
from vllm_spec_ext.errors import SpecExtError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from vllm_spec_ext.cli.main import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


def call(*arguments: str) -> int:
    """Run in this process; returns the exit status."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command ``trial`` whose function each test replaces."""
    module = ModuleType("spec_ext_trial_command")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__spec__ = type(sys.__spec__)(module.__name__, None)
    lazy = cli._LazyCommand(f"{module.__name__}:trial", "For tests.")
    monkeypatch.setitem(cli.COMMANDS, "trial", lazy)
    return module


def set_error(module: ModuleType, error: BaseException) -> None:
    def trial() -> None:
        raise error

    module.trial = trial  # type: ignore[attr-defined]


def test_help_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys\nfrom vllm_spec_ext.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    heavy = {'torch', 'vllm', 'numba', 'transformers'} & set(sys.modules)\n"
        "    print('loaded:', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loaded: []" in done.stdout
    for name in ("list", "explain", "serve", "doctor"):
        assert name in done.stdout


def test_commands_that_do_not_exist_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "later", cli._LazyCommand("vllm_spec_ext.later:f", "Later."))
    assert "later" not in cli._LazyGroup().list_commands(None)
    assert call("later") == 2


def test_every_command_loads_and_has_help() -> None:
    for name, lazy in cli.COMMANDS.items():
        if lazy.exists():
            assert lazy.load(name).name == name
            assert lazy.help.endswith(".")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith("vllm-spec-ext 0.")


def test_unknown_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("lst") == 2
    assert "lst" in capsys.readouterr().err
    assert call("list", "--lossy") == 2
    assert "--lossy" in capsys.readouterr().err


def test_vllm_options_before_the_dashes_get_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("serve", "model", "--method", "x", "--port", "80") == 2
    assert "behind a lone --" in capsys.readouterr().err


def test_bad_input_is_one_line_and_exit_2(
    command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    set_error(command, SpecExtError("found x, expected y; fix: z"))
    assert call("trial") == 2
    assert capsys.readouterr().err == "vllm-spec: found x, expected y; fix: z\n"


def test_failed_check_is_exit_1(command: ModuleType) -> None:
    set_error(command, typer.Exit(1))
    assert call("trial") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_ctrl_c_is_exit_130(command: ModuleType, error: BaseException) -> None:
    set_error(command, error)
    assert call("trial") == 130


def test_our_own_errors_show_no_traceback(
    command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    set_error(command, RuntimeError("broken"))
    assert call("trial") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("vllm-spec: RuntimeError: broken\n")
    assert "Traceback" not in shown


@pytest.mark.parametrize("arguments", [("--debug", "trial"), ("trial", "--debug")])
def test_debug_raises(command: ModuleType, arguments: tuple[str, ...]) -> None:
    set_error(command, SpecExtError("found x"))
    with pytest.raises(SpecExtError, match="found x"):
        cli.main(arguments)


def test_debug_behind_the_dashes_is_not_ours(command: ModuleType) -> None:
    seen: list[list[str]] = []

    def trial(words: list[str]) -> None:
        seen.append(words)

    command.trial = trial  # type: ignore[attr-defined]
    assert call("trial", "--", "--debug", "x") == 0
    assert seen == [["--debug", "x"]]


def test_groups_of_commands(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    group = typer.Typer(help="A group.")

    @group.command()
    def one() -> None:
        print("one ran")

    @group.command()
    def two() -> None:
        raise SpecExtError("two failed")

    command.trial = group  # type: ignore[attr-defined]
    assert call("trial", "one") == 0
    assert "one ran" in capsys.readouterr().out
    assert call("trial", "two") == 2


def test_reader_that_goes_away() -> None:
    code = "from vllm_spec_ext.cli.main import main; main(['--help'])"
    done = subprocess.run(
        f"{sys.executable} -c \"{code}\" | true", shell=True, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr


def test_installed_style_call() -> None:
    done = run("explain", "no_such_method")
    assert done.returncode == 2
    assert "unknown speculative method: 'no_such_method'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("command", ["train nar", "train draft", "bench", "plan paper"])
def test_no_name_of_an_option_is_cut(
    command: str,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "\\[" not in shown


def test_help_shows_every_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are markup in a help text, and vanish where they are not escaped."""
    monkeypatch.setenv("COLUMNS", "120")  # in panels
    seen = set()

    def look(names: str, shown: Any) -> None:
        for inner in getattr(shown, "commands", {}).values():
            look(f"{names} {inner.name}", inner)
        for parameter in shown.params:
            for escape in re.findall(r"(\\?)\[default", getattr(parameter, "help", None) or ""):
                seen.add(names)
                assert escape, (names, parameter.name)

    for name, entry in cli.COMMANDS.items():
        look(name, entry.load(name))
    assert seen >= {"bench", "plan", "doctor", "plan cluster", "plan paper"}
