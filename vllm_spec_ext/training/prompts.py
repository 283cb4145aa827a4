# SPDX-License-Identifier: Apache-2.0
"""Prompts from jsonl (also .gz) and text files, with errors that name file and line."""

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_spec_ext.errors import SpecExtError

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def read_prompts(
    files: Sequence[str | Path], field: str, limit: int | None = None, seed: int = 0
) -> list[str]:
    """All prompts of some files, in order.

    Args:
        files: ``.jsonl`` files hold one object a line; all others one prompt a line, empty lines
            skipped. ``.gz`` after either is unpacked.
        field: Where the prompt is in an object: a key, with ``.key`` and ``[index]`` after it,
            e.g. ``prompt`` or ``turns[0]``. Several, separated by commas: the first that a line
            has counts, so that files of different shapes can be mixed.
        limit: Keep only this many, drawn at random from all files.
        seed: Of that draw.

    Raises:
        SpecExtError: No such file, wrong shape (with file and line), or no prompt at all.
    """
    prompts = [prompt for name in files for prompt in _read_file(Path(name).expanduser(), field)]
    if not prompts:
        raise SpecExtError(f"no prompts in {', '.join(str(name) for name in files) or 'no files'}")
    if limit is not None and limit < len(prompts):
        kept = sorted(random.Random(seed).sample(range(len(prompts)), limit))
        prompts = [prompts[i] for i in kept]
    return prompts


def _read_file(path: Path, field: str) -> Iterator[str]:
    if not path.is_file():
        raise SpecExtError(f"no such prompt file: {path} (looked in {Path.cwd()})")
    packed = path.suffix == ".gz"
    kind = Path(path.stem).suffix if packed else path.suffix
    number = 0
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8").strip()
                if line:
                    yield _from_json(line, field, path, number) if kind == ".jsonl" else line
    except UnicodeDecodeError as error:
        raise SpecExtError(f"{path}:{number}: not UTF-8 text ({error.reason})") from error
    except (gzip.BadGzipFile, EOFError) as error:
        raise SpecExtError(f"{path}: damaged gzip file after line {number}: {error}") from error


def _from_json(line: str, field: str, path: Path, number: int) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecExtError(f"{path}:{number}: not a JSON object: {error}") from error
    for name in field.split(","):
        try:
            value = _at(record, name.strip())
        except (KeyError, IndexError, TypeError):
            continue
        if not isinstance(value, str):
            raise SpecExtError(
                f"{path}:{number}: {name.strip()!r} is {type(value).__name__}, expected text; name "
                "a text field with --field, e.g. 'turns[0]' for the first of a list"
            )
        return value
    shape = f"keys {', '.join(map(str, record))}" if isinstance(record, dict) else repr(record)
    raise SpecExtError(
        f"{path}:{number}: no {field!r} in this line; found {shape[:200]}. Name the prompt's field "
        "with --field, e.g. --field question or --field 'turns[0]'"
    )


def _at(record: Any, name: str) -> Any:
    for key, index in _STEP.findall(name):
        record = record[int(index)] if index else record[key]
    return record
