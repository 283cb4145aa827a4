# SPDX-License-Identifier: Apache-2.0
"""Documents of a corpus: text, JSON lines and parquet files, read piece by piece."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.whole_text import check_whole

PIECE_CHARS = 1 << 16


def read_documents(path: Path, field: str) -> Iterator[tuple[str, int]]:
    """Yield each document with the bytes of the file read since the one before.

    Args:
        path: ``.jsonl``, ``.parquet`` or text, the first and last also as ``.gz``. A text file is
            cut into pieces of about 64 Ki characters at line ends, so no trigram spans a cut:
            approximation: 2 of some 16,000 trigrams are lost.
        field: Field or column that holds the text in JSON lines and parquet.

    Raises:
        SpecExtError: Unreadable, not UTF-8, with half a character, without the field, or parquet
            without pyarrow.
    """
    if not path.is_file():
        raise SpecExtError(f"no such file: {path}; give text, .jsonl or .parquet files as --input")
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        yield from _parquet(path, field)
        return
    reader = _jsonl if name.endswith((".jsonl", ".ndjson")) else _text
    with path.open("rb") as raw:
        plain = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        done = 0
        try:
            for document in reader(io.TextIOWrapper(plain, encoding="utf-8-sig"), path, field):
                position = raw.tell()
                yield document, position - done
                done = position
        except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise SpecExtError(f"cannot read {path}: {error}; expected UTF-8 text") from error


def _text(lines: io.TextIOWrapper, path: Path, field: str) -> Iterator[str]:
    piece: list[str] = []
    size = 0
    # A bounded readline: a file of one line must not become one document.
    while line := lines.readline(PIECE_CHARS):
        piece.append(line)
        size += len(line)
        if size >= PIECE_CHARS:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _jsonl(lines: io.TextIOWrapper, path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SpecExtError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict) or field not in row:
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise SpecExtError(
                f"{path}, line {number}: found {found}, expected a field {field!r}; "
                "name the right one with --field"
            )
        yield from _texts(row[field], f"{path}, line {number}, field {field!r}")


def _texts(value: object, where: str) -> Iterator[str]:
    """Texts of a field: a string, or a list of strings or of chat messages."""
    for item in value if isinstance(value, list) else [value]:
        text = item.get("content") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise SpecExtError(
                f"{where}: found {type(text).__name__}, expected a text, a list of texts or a "
                "list of messages with 'content'"
            )
        check_whole(text, where)
        yield text


def _parquet(path: Path, field: str) -> Iterator[tuple[str, int]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise SpecExtError(
            f"reading {path} needs pyarrow; install it with `pip install pyarrow`, or convert the "
            "file to .jsonl"
        ) from error
    table = parquet.ParquetFile(path)
    if field not in table.schema_arrow.names:
        raise SpecExtError(
            f"{path}: found columns {', '.join(table.schema_arrow.names)}, expected {field!r}; "
            "name the right one with --field"
        )
    share = path.stat().st_size / max(1, table.metadata.num_rows)
    for batch in table.iter_batches(batch_size=256, columns=[field]):
        for value in batch.column(0).to_pylist():
            for text in _texts(value, f"{path}, column {field!r}"):
                yield text, int(share)
