# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``vllm-spec``: the table of commands, and what errors look like.

A command's module is imported when that command is called, so ``vllm-spec --help`` loads neither
torch nor vLLM. Exit status: 0 success, 1 a check failed, 2 bad input, 130 Ctrl-C.
"""

import importlib
import importlib.util
import os
import pkgutil
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from vllm_spec_ext import __version__
from vllm_spec_ext.errors import SpecExtError

# Usage errors of the command-line parser (typer brings its own or uses click's, by version).
_UsageError: Any = typer.BadParameter.__bases__[0]


@dataclass(frozen=True)
class _LazyCommand:
    target: str  # "module:attribute"; the attribute is a function or a typer.Typer
    help: str
    passes_on: bool = False  # has a list of foreign arguments behind "--"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def exists(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def load(self, name: str) -> Any:
        """The real command, as typer makes it from the function or application."""
        found = pkgutil.resolve_name(self.target)
        if not isinstance(found, typer.Typer):
            application = typer.Typer(add_completion=False)
            application.command(name)(found)
            found = application
        command = typer.main.get_command(found)
        command.name = name
        if shutil.get_terminal_size().columns < _LEAST_FOR_PANELS:
            without_panels(command)
        return command


_LEAST_FOR_PANELS = 110


def without_panels(command: Any) -> None:
    """Print help as plain lines: in narrow panels the names of options are cut."""
    command.rich_markup_mode = None
    for option in command.params:
        option.help = (getattr(option, "help", None) or "").replace("\\[", "[")  # of rich's markup
    for each in getattr(command, "commands", {}).values():
        without_panels(each)


_CLI = "vllm_spec_ext.cli"
COMMANDS = {
    "list": _LazyCommand(f"{_CLI}.list_methods:list_methods", "The speculative methods."),
    "explain": _LazyCommand(
        f"{_CLI}.explain:explain", "A method's options, and commands to paste."
    ),
    "serve": _LazyCommand(
        f"{_CLI}.serve:serve", "Run `vllm serve` with one of our methods.", passes_on=True
    ),
    "demo": _LazyCommand(f"{_CLI}.demo:demo", "Watch speculation at work on a small model."),
    "bench": _LazyCommand(f"{_CLI}.bench:bench", "Measure methods against plain decoding."),
    "report": _LazyCommand(f"{_CLI}.report:report", "Pages and figures from benchmark results."),
    "plan": _LazyCommand(
        f"{_CLI}.plan:plan_app", "What draft tokens cost here, and what they gain."
    ),
    "corpus": _LazyCommand(f"{_CLI}.corpus:corpus_app", "Build and inspect n-gram corpora."),
    "simulate": _LazyCommand(f"{_CLI}.simulate:simulate", "Replay text through a proposer."),
    "train": _LazyCommand(f"{_CLI}.train:train_app", "Train what trained proposers need."),
    "online": _LazyCommand(f"{_CLI}.online:online_app", "Drafters that learn while they serve."),
    "explain-step": _LazyCommand(f"{_CLI}.explain_step:explain_step", "One step, draft by draft."),
    "top": _LazyCommand(f"{_CLI}.top:top", "Watch a running server's speculation."),
    "doctor": _LazyCommand(f"{_CLI}.doctor:doctor", "Check this environment, with fixes."),
}


class _LazyGroup(TyperGroup):
    """Lists the commands from the table, and loads one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, command in COMMANDS.items() if command.exists()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = COMMANDS.get(cmd_name)
        if command is None or not command.exists():
            return None
        return TyperCommand(cmd_name, help=command.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name in COMMANDS:
            command = COMMANDS[name].load(name)
        return name, command, rest


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"vllm-spec-ext {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version)
    ] = False,
) -> None:
    """Speculative-decoding methods for vLLM: the same text, faster."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; see the module's text for the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Also behind the command's name, where people type it; but what follows "--" is not ours.
    ours = given[: given.index("--")] if "--" in given else given
    debug = "--debug" in ours
    given = ["--debug"] * debug + [word for word in ours if word != "--debug"] + given[len(ours) :]
    sys.exit(_run(given, debug))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        status = app(arguments, prog_name="vllm-spec", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        print("\nvllm-spec: interrupted", file=sys.stderr)
        return 130
    except typer.Exit as stop:
        return stop.exit_code
    except _UsageError as error:
        error.show(file=sys.stderr)
        command = COMMANDS.get(next((word for word in arguments if word in COMMANDS), ""))
        if command and command.passes_on and "--" not in arguments:
            print("Options of vLLM itself go behind a lone --", file=sys.stderr)
        return 2
    except SpecExtError as error:
        if debug:
            raise
        print(f"vllm-spec: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader went away (`vllm-spec list | head`); keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        print(
            f"vllm-spec: {type(error).__name__}: {error}\n"
            "(an error in vllm-spec-ext or its environment; --debug shows the traceback)",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    main()
