# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec serve``: checks the options, then becomes ``vllm serve``."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from vllm_spec_ext.cli import vllm_metadata
from vllm_spec_ext.cli.file_check import check_files
from vllm_spec_ext.cli.plugin_visibility import invisible_because
from vllm_spec_ext.compat import require
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.parsed_method import parse_method

# Options of `vllm serve` that would contradict ours.
_OURS = ("--speculative-config", "--speculative_config", "-sc", "--spec-")


def serve(
    model: Annotated[str, typer.Argument(help="Target model: a name or a folder.")],
    method: Annotated[str, typer.Option("--method", "-m", help="See `vllm-spec list`.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the method, see `vllm-spec explain METHOD`; may be repeated.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(help="Most draft tokens a step; default: the method's own."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check options and files, print the command, and stop."),
    ] = False,
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="Arguments for `vllm serve` itself, behind --."),
    ] = None,
) -> None:
    """Start an OpenAI-compatible server that drafts with one of our methods."""
    config = speculative_config(method, parse_settings(settings or []), num_speculative_tokens)
    arguments = serve_arguments(model, config, vllm_arguments or [])
    if dry_run:
        parsed = parse_method(config, method)
        line = check_files(model, parsed, vllm_arguments or [])
        if line:
            print(f"vllm-spec: {line}", file=sys.stderr)
    print(shlex.join(["vllm", *arguments]), flush=True)
    if dry_run:
        return
    reason = invisible_because()
    if reason is not None:
        raise SpecExtError(f"vLLM would not know {method!r}: {reason}")
    require()
    variables = vllm_metadata.environment()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]
    os.execve(sys.executable, command, variables)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` pairs; a value is JSON, or else the text itself.

    Raises:
        SpecExtError: No ``=``, no key, or a key given twice.
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise SpecExtError(f"--set {setting}: expected KEY=VALUE, e.g. --set min_ngram=2")
        if key in parsed:
            raise SpecExtError(f"--set {key} is given twice; keep one of them")
        try:
            parsed[key] = json.loads(text)
        except json.JSONDecodeError:
            parsed[key] = text
    return parsed


def speculative_config(
    method: str, options: Mapping[str, Any], num_speculative_tokens: int | None
) -> dict[str, Any]:
    """The JSON for ``--speculative-config``, validated against the method's schema.

    Raises:
        UnknownNameError: No such method or option.
        SpecExtError: A wrong value, or a missing ``num_speculative_tokens``.
    """
    if "num_speculative_tokens" in options:
        raise SpecExtError(
            "num_speculative_tokens is not an option of the method; "
            "use --num-speculative-tokens N instead of --set"
        )
    if "method" in options:
        raise SpecExtError("method is not an option of the method; use --method NAME instead")
    # The method's own default is the engine's to choose: on a GPU it is another.
    tokens = num_speculative_tokens
    given = {} if tokens is None else {"num_speculative_tokens": tokens}
    config = {"method": method, **given, **options}
    parse_method(config, method)
    return config


def serve_arguments(
    model: str, config: Mapping[str, Any], vllm_arguments: Sequence[str]
) -> list[str]:
    """Everything behind the word ``vllm``.

    Raises:
        SpecExtError: The user's own arguments hold a speculative configuration too.
    """
    for argument in vllm_arguments:
        name = argument.partition("=")[0]
        # vLLM reads --speculative-config.method=... as a part of that option.
        if name.partition(".")[0] in _OURS or name.startswith("--spec-"):
            raise SpecExtError(
                f"found {name} behind --, but --method, --set and "
                "--num-speculative-tokens make that part; remove one of the two"
            )
    return ["serve", model, "--speculative-config", json.dumps(config), *vllm_arguments]
