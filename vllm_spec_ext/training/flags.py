# SPDX-License-Identifier: Apache-2.0
"""Settings from a config file and command-line flags, both made from a pydantic schema."""

import argparse
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import Options, parse_options

SchemaT = TypeVar("SchemaT", bound=Options)


def flag_name(field: str) -> str:
    """``max_new_tokens`` -> ``--max-new-tokens``."""
    return "--" + field.replace("_", "-")


def field_kind(field: FieldInfo) -> str:
    """``"bool"``, ``"list"`` or ``"value"``: how a flag for the field looks."""
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if annotation is bool:
        return "bool"
    return "list" if get_origin(annotation) is list else "value"


def field_metavar(field: FieldInfo) -> str:
    """What a flag's value looks like: its choices, or the name of its type."""
    parts = [field.annotation, *get_args(field.annotation)]
    choices = next((get_args(part) for part in parts if get_origin(part) is Literal), None)
    if choices:
        return "|".join(map(str, choices))
    names = {int: "INT", float: "FLOAT", Path: "PATH", list[Path]: "PATHS"}
    return next((names[part] for part in parts if part in names), "TEXT")


def field_help(field: FieldInfo) -> str:
    """Help text: the field's documentation and its default."""
    text = " ".join((field.description or "").split()).replace("``", "")
    if field.is_required():
        return f"{text} Required."
    default = field.get_default(call_default_factory=True)
    return text if default is None or default == [] else f"{text} [default: {default}]"


def add_flags(parser: argparse.ArgumentParser, schema: type[Options]) -> None:
    """One flag per field, and ``--config``. Flags that are not given are absent from the result."""
    parser.add_argument("--config", type=Path, help="yaml or json file with any of these settings")
    for name, field in schema.model_fields.items():
        help_text = field_help(field).replace("%", "%%")
        arguments: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text}
        if field_kind(field) == "bool":
            arguments["action"] = argparse.BooleanOptionalAction
        elif field_kind(field) == "list":
            arguments.update(nargs="+", action="extend", metavar="PATH")
        else:
            arguments["metavar"] = field_metavar(field)
        parser.add_argument(flag_name(name), **arguments)


def read_config(path: Path) -> dict[str, Any]:
    """Settings from a yaml or json file; ``-`` and ``_`` in names are the same.

    Raises:
        SpecExtError: No such file, not yaml or json, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecExtError(f"cannot read the config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecExtError(
            f"the config file {path} is not UTF-8 text ({error.reason} at byte {error.start}); "
            "save it as UTF-8"
        ) from error
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml  # type: ignore[import-untyped,unused-ignore]

            value = yaml.safe_load(text)
        else:
            value = json.loads(text)
    except ImportError as error:
        raise SpecExtError(f"{path}: reading yaml needs PyYAML; install it or use json") from error
    except Exception as error:  # yaml's and json's errors share no useful base class
        raise SpecExtError(f"{path} is not valid {path.suffix[1:] or 'json'}: {error}") from error
    if not isinstance(value, dict):
        raise SpecExtError(f"{path}: expected settings (name: value), found {type(value).__name__}")
    return {str(name).replace("-", "_"): item for name, item in value.items()}


def settings(
    schema: type[SchemaT], config: Path | None, flags: Mapping[str, Any], owner: str
) -> SchemaT:
    """Settings of a config file, overridden by flags, and validated.

    Raises:
        SpecExtError: As :func:`read_config`, an unknown name, a wrong or a missing value.
    """
    given = {**(read_config(config) if config else {}), **flags}
    missing = [
        n for n, field in schema.model_fields.items() if field.is_required() and n not in given
    ]
    if missing:
        names = ", ".join(flag_name(name) for name in missing)
        raise SpecExtError(f"{owner} needs {names}; give them as flags or in --config")
    return parse_options(schema, given, owner)


def parse_command_line(
    schema: type[SchemaT], arguments: Sequence[str] | None, owner: str, description: str
) -> SchemaT:
    """Settings from ``sys.argv``-like arguments, without any command-line framework."""
    parser = argparse.ArgumentParser(prog=owner, description=description)
    add_flags(parser, schema)
    flags = vars(parser.parse_args(arguments))
    return settings(schema, flags.pop("config"), flags, owner)
