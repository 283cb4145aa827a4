# SPDX-License-Identifier: Apache-2.0
"""From what a user wrote to validated options, with errors a user can act on."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from vllm_spec_ext.errors import SpecExtError, UnknownNameError, shown

if TYPE_CHECKING:
    from vllm_spec_ext.options.base import Options

OptionsT = TypeVar("OptionsT", bound="Options")


def parse_json(text: str) -> Any:
    """Read JSON text of a client.

    Raises:
        ValueError: With a short reason, whatever is wrong with the text: its grammar, its depth,
            numbers of thousands of digits, or NaN and Infinity, which are no JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


RENAMED_OPTIONS: Mapping[str, str] = {"pays": "adaptive_length"}
"""Former names of options, by which they are refused with the new one."""


def unknown_option(
    schema: "type[Options]", owner: str, name: str, valid: Iterable[str]
) -> UnknownNameError:
    """The error for an option that does not exist, or no longer under this name.

    Args:
        schema: The option class without it.
        owner: Whose options these are.
        name: As the user gave it.
        valid: All names that would have been right here.
    """
    return UnknownNameError(
        f"option of {owner}",
        name,
        valid,
        renamed=RENAMED_OPTIONS.get(name),
        reason=schema.moved_options.get(name),
    )


def parse_options(schema: type[OptionsT], given: Mapping[str, Any], owner: str) -> OptionsT:
    """Validate a mapping against a schema, with errors a user can act on.

    Args:
        schema: The option class.
        given: Option names and values as the user gave them.
        owner: Whose options these are, for the message, e.g. ``"input_copy"``.

    Raises:
        UnknownNameError: A key that the schema does not have.
        SpecExtError: A wrong type or a value out of range; one line per field.
    """
    for name in given:
        if name not in schema.model_fields:
            raise unknown_option(schema, owner, str(name), schema.model_fields)
    try:
        return schema.model_validate(dict(given))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            text = problem["msg"].removeprefix("Value error, ")
            if problem["loc"]:  # else it is about several options together
                where = ".".join(str(part) for part in problem["loc"])
                text = f"{where}: {text}; found {shown(problem['input'])}"
                if problem["type"] == "missing":
                    text = f"{where} is missing; add it"
            lines.append(text)
        raise SpecExtError(f"bad option of {owner}: " + "; ".join(lines)) from error
