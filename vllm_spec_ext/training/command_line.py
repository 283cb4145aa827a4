# SPDX-License-Identifier: Apache-2.0
"""A trainer's command line without any framework, for ``python -m``."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.flags import SchemaT, parse_command_line


def run_trainer(
    schema: type[SchemaT],
    train: Callable[[SchemaT, Callable[[str], None]], Any],
    arguments: Sequence[str] | None,
    owner: str,
    description: str,
) -> int:
    """Read the settings, train, and say what went wrong.

    Args:
        schema: Settings class.
        train: Called with the settings and what prints a progress line.
        arguments: Words of the command line; None = those of this process.
        owner: The command, for messages.
        description: What it does, for ``--help``.

    Returns:
        Exit status: 0 success, 2 bad input, 130 Ctrl-C, 1 any other error.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        words = [word for word in given if word != "--debug"]
        config = parse_command_line(schema, words, owner, description)
        train(config, lambda line: print(line, flush=True))
    except SpecExtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            raise
        print(
            f"error: {type(error).__name__}: {error}\n"
            "(an error in vllm-spec-ext or its environment; --debug shows the traceback)",
            file=sys.stderr,
        )
        return 1
    return 0
