# SPDX-License-Identifier: Apache-2.0
"""Prompts from jsonl, json and text files (also .gz), with errors that name file and line."""

import gzip
import json
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.whole_text import check_whole

_OBJECTS = (".jsonl", ".ndjson", ".json")
_TABLES = {  # what reads them in pandas
    ".csv": "read_csv",
    ".tsv": "read_table",
    ".parquet": "read_parquet",
    ".xlsx": "read_excel",
}
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def read_prompts(
    files: Sequence[str | Path], field: str, limit: int | None = None, seed: int = 0
) -> list[str]:
    """All prompts of some files, in order.

    Args:
        files: ``.jsonl`` and ``.ndjson`` files hold one object a line; ``.json`` files that, or one
            array of objects or texts; all others one prompt a line, empty lines skipped. ``.gz``
            after any of them is unpacked.
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
        raise SpecExtError(
            f"no prompts in {', '.join(str(name) for name in files) or 'no files'}; expected lines "
            'like {"prompt": "..."} in a .jsonl file, or one prompt a line in a .txt file'
        )
    if limit is not None and limit < len(prompts):
        kept = sorted(random.Random(seed).sample(range(len(prompts)), limit))
        prompts = [prompts[i] for i in kept]
    return prompts


def check_prompt_file(path: Path) -> None:
    """Raise SpecExtError if there is none."""
    if not path.is_file():
        raise SpecExtError(f"no such prompt file: {path} (looked in {Path.cwd()})")


def _read_file(path: Path, field: str) -> Iterator[str]:
    check_prompt_file(path)
    packed = path.suffix.lower() == ".gz"
    kind = Path(path.stem if packed else path.name).suffix.lower()
    if kind in _TABLES:
        raise SpecExtError(
            f"{path}: {kind} files are not read, only .jsonl, .json and text; convert it, e.g. "
            f'python -c "import pandas; pandas.{_TABLES[kind]}({path.name!r})'
            ".to_json('prompts.jsonl', orient='records', lines=True)\""
        )
    number = 0
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            if kind == ".json":
                # Many data sets call one object a line .json, too; an array starts with a bracket.
                if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                    file.seek(0)
                    records = _parse(file.read().decode("utf-8-sig"), path, 1)
                    for number, record in enumerate(records, start=1):
                        yield _prompt_of(record, field, path, number)
                    return
                file.seek(0)
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8-sig").strip()
                if line and kind in _OBJECTS:
                    yield _prompt_of(_parse(line, path, number), field, path, number)
                elif line:
                    yield line
    except UnicodeDecodeError as error:
        raise SpecExtError(
            f"{path}:{number}: not UTF-8 text ({error.reason}); save it as UTF-8"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SpecExtError(f"{path}: damaged gzip file after line {number}: {error}") from error


def _parse(text: str, path: Path, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecExtError(
            f"{path}:{number}: not a JSON object: {error}; expected one like "
            '{"prompt": "..."} a line, or an array of them in a .json file. Plain text, one prompt '
            "a line, belongs in a .txt file"
        ) from error


def _prompt_of(record: Any, field: str, path: Path, number: int) -> str:
    text = record if isinstance(record, str) else _text_in(record, field, path, number)
    check_whole(text, f"{path}:{number}", "prompt")
    return text


def _text_in(record: Any, field: str, path: Path, number: int) -> str:
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
        # A text has letters for an index, and no field.
        if (index and not isinstance(record, list)) or (key and not isinstance(record, dict)):
            raise TypeError
        record = record[int(index)] if index else record[key]
    return record
