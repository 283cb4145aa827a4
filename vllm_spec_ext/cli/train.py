# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec train METHOD``: every flag comes from the method's settings schema."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from vllm_spec_ext.cli.many_values import ManyValues
from vllm_spec_ext.options import Options
from vllm_spec_ext.training.flags import field_help, field_kind, field_metavar, flag_name, settings
from vllm_spec_ext.training.registry import TRAINERS, Trainer

train_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Train heads and draft models."
)


def schema_command(
    schema: type[Options], owner: str, run: Callable[[Any], Any], summary: str
) -> Callable[..., None]:
    """A typer command with one flag per field of a schema, and ``--config``.

    Flags are passed on as text, and only those that were given, so that a config file and the
    schema's defaults stand behind them and pydantic alone checks values.

    Args:
        schema: Settings class.
        owner: Its name in error messages.
        run: Called with the validated settings.
        summary: Help text of the command.
    """

    def command(config: Path | None = None, **flags: Any) -> None:
        given = {name: value for name, value in flags.items() if value not in (None, [])}
        run(settings(schema, config, given, owner))

    def parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
        annotation = Annotated[kind, option]
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )

    kinds: dict[str, Any] = {"bool": Optional[bool], "list": Optional[list[str]]}  # noqa: UP045
    parameters = [
        parameter(
            "config",
            Optional[Path],  # noqa: UP045  (typer reads the annotation at run time)
            typer.Option("--config", help="yaml or json file with any of these settings."),
        )
    ]
    for name, field in schema.model_fields.items():
        flag = flag_name(name)
        if field_kind(field) == "bool":
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        option = typer.Option(
            flag,
            help=field_help(field).replace("[", r"\["),
            metavar=None if field_kind(field) == "bool" else field_metavar(field),
            show_default=False,
        )
        parameters.append(parameter(name, kinds.get(field_kind(field), Optional[str]), option))  # noqa: UP045
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = summary
    return command


def add_method(app: typer.Typer, name: str, trainer: Trainer) -> None:
    """A command for one method; its trainer is loaded when it runs."""
    command = schema_command(
        trainer.load_settings(),
        f"train {name}",
        lambda config: trainer.load_run()(config, typer.echo),
        trainer.summary,
    )
    app.command(name, cls=ManyValues)(command)


for _name, _trainer in TRAINERS.items():
    add_method(train_app, _name, _trainer)


@train_app.callback()
def _group() -> None:
    """Keep methods named subcommands also while there is only one."""
