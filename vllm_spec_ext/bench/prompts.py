# SPDX-License-Identifier: Apache-2.0
"""Prompt files: one JSON object a line, read strictly."""

import gzip
import hashlib
import itertools
import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.whole_text import check_whole

BUNDLED = "bundled"
ALL = "all"  # category of a line that names none
WITHIN_DATASET = " > "  # between a dataset's name and the file's own category
PLACEHOLDER = "{text}"

Message = dict[str, str]  # {"role": ..., "content": ...}


class NoFieldError(SpecExtError):
    """A line lacks the field that was to hold its prompt."""

    def __init__(self, found: str) -> None:
        """Keep what was found, for those whose fields are not chosen by a flag."""
        super().__init__(f"{found}; choose one with --field")
        self.found = found


@dataclass(frozen=True)
class Question:
    """One conversation to answer."""

    line: int  # 1-based line of the prompt file
    category: str
    opening: tuple[Message, ...]  # messages before the first answer
    follow_ups: tuple[str, ...] = ()  # user messages of the later turns, sent after each answer
    expected: str | None = None  # what a right answer holds, where that can be told


def load(
    source: str,
    *,
    field: str,
    template: str | None,
    limit: int | None,
    chance: random.Random | None = None,
) -> list[Question]:
    """Read questions.

    Args:
        source: Path of a JSON Lines file, which may be gzipped (``.gz``), or ``bundled`` for the
            prompts of this package.
        field: Key that holds the prompt: a text, a list of texts (turns of one conversation, as
            in Spec-Bench), or a list of chat messages.
        template: Text with ``{text}`` into which each text is put; not for chat messages.
        limit: Keep this many questions, spread evenly over the file; ``None`` keeps all.
        chance: Chooses which ones, see :func:`spread_evenly`.

    Raises:
        SpecExtError: The file is missing or empty, or a line has the wrong shape; names the line.
    """
    check_template(template)
    questions = []
    for number, line in enumerate(_lines(source), 1):
        if line.strip():
            questions.append(parse_line(line, f"{source}, line {number}", number, field, template))
    if not questions:
        raise SpecExtError(f"{source} holds no prompts; expected one JSON object a line")
    return spread_evenly(questions, limit, chance)


def load_lines(
    source: str, *, template: str | None, limit: int | None, chance: random.Random | None = None
) -> list[Question]:
    """Read a text file in which every line that is not empty is a prompt.

    Arguments and errors as :func:`load`.
    """
    check_template(template)
    questions = [
        Question(number, ALL, ({"role": "user", "content": _filled(template, line.strip())},))
        for number, line in enumerate(_lines(source), 1)
        if line.strip()
    ]
    if not questions:
        raise SpecExtError(f"{source} holds no prompts; expected one a line")
    return spread_evenly(questions, limit, chance)


def spread_evenly(
    questions: list[Question], limit: int | None, chance: random.Random | None = None
) -> list[Question]:
    """At most ``limit`` of them, one from each of as many equal parts of the list.

    Args:
        questions: All there are.
        limit: ``None`` keeps all.
        chance: Chooses within each part; without it the first one is taken.
    """
    if limit is None or limit >= len(questions):
        return questions
    ends = [i * len(questions) // limit for i in range(limit + 1)]
    return [
        questions[first if chance is None else chance.randrange(first, end)]
        for first, end in itertools.pairwise(ends)
    ]


def check_template(template: str | None) -> None:
    """Raises SpecExtError if there is no place for the text."""
    if template is not None and PLACEHOLDER not in template:
        raise SpecExtError(f"template {template!r} does not contain {PLACEHOLDER}")


def _filled(template: str | None, text: str) -> str:
    # Not str.format: prompts and templates may hold other braces (code).
    return text if template is None else template.replace(PLACEHOLDER, text)


def parse_line(line: str, where: str, number: int, field: str, template: str | None) -> Question:
    """One line of a prompt file; raises as :func:`load`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecExtError(f"{where}: not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:  # a number too long, or lists too deep
        raise SpecExtError(f"{where}: not JSON that can be read: {error}") from error
    if not isinstance(row, dict):
        raise SpecExtError(f"{where}: found {type(row).__name__}, expected an object")
    if field not in row:
        raise NoFieldError(
            f"{where}: no field {field!r}; found {', '.join(map(repr, row)) or 'none'}"
        )
    category = row.get("category")
    if category is None:
        category = ALL
    if not isinstance(category, str):
        raise SpecExtError(f"{where}: 'category' is {category!r}, expected a text")
    check_whole(category, where, "'category'")
    value = row[field]
    if isinstance(value, str):
        texts = [value]
    elif isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        texts = value
    elif isinstance(value, list) and value and all(map(_is_message, value)):
        if template is not None:
            raise SpecExtError(f"{where}: --template is for texts, {field!r} holds chat messages")
        for text in (str(part) for message in value for part in message.values()):
            check_whole(text, where, repr(field))
        return Question(number, category, tuple(value))
    else:
        raise SpecExtError(
            f"{where}: {field!r} is {_shortened(value)}; expected a text, a list of texts (turns), "
            'or a list of messages {"role": ..., "content": ...}'
        )
    if not all(text.strip() for text in texts):
        raise SpecExtError(f"{where}: {field!r} is empty")
    texts = [_filled(template, text) for text in texts]
    for text in texts:
        check_whole(text, where, repr(field))
    return Question(number, category, ({"role": "user", "content": texts[0]},), tuple(texts[1:]))


def digest(questions: Sequence[Question]) -> str:
    """SHA-256 over the questions as they are sent, to tell whether two results are comparable."""
    rows = [[q.category, list(q.opening), list(q.follow_ups)] for q in questions]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _lines(source: str) -> list[str]:
    # Not splitlines, which also breaks at U+2028, U+2029 and U+0085: JSON texts may hold them.
    return [line.removesuffix("\r") for line in read_text(source).split("\n")]


def read_text(source: str) -> str:
    """A whole file, gzipped or not, or the bundled prompts; raises SpecExtError."""
    if source == BUNDLED:
        folder = files("vllm_spec_ext.cli") / "prompts"
        return "\n".join(
            entry.read_text(encoding="utf-8").rstrip("\n")
            for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
            if entry.name.endswith(".jsonl")
        )
    try:
        data = Path(source).read_bytes()
        return (gzip.decompress(data) if source.endswith(".gz") else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SpecExtError(
            f"cannot read prompts {source!r}: {error}; give a JSON Lines file or {BUNDLED!r}"
        ) from error


def _is_message(part: object) -> bool:
    return isinstance(part, dict) and all(isinstance(part.get(k), str) for k in ("role", "content"))


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
