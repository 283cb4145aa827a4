# SPDX-License-Identifier: Apache-2.0
"""Datasets of a benchmark: files of known shapes by name, prompts made here, and any other file.

A question's category is the dataset's name, followed by the file's own category if it has one, so
that reports show each dataset, and each category of it.
"""

import dataclasses
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pydantic import Field

from vllm_spec_ext.bench import long_context, prompts
from vllm_spec_ext.bench.long_context import LONG_DOCUMENTS, NEEDLES
from vllm_spec_ext.bench.made_up_text import sentence
from vllm_spec_ext.bench.prompts import ALL, WITHIN_DATASET, Question
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import Options

COPY_RATE = "copy_rate"
COPY_RATES = (0, 25, 50, 75, 100)  # percent of the sentences that are to be written again
MADE_HERE = (COPY_RATE, NEEDLES)
_SENTENCES = 8


_MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)


@dataclass(frozen=True)
class Shape:
    """How the file of a well-known dataset is read."""

    field: str | None  # of a JSON line; None: each line of the file is a text
    template: str | None = None
    groups: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the file's categories


KNOWN: dict[str, Shape] = {
    # question.jsonl of hemingkx/Spec-Bench, which pools MT-Bench's categories.
    "spec_bench": Shape("turns", groups=dict.fromkeys(_MT_BENCH, "mt_bench")),
    "humaneval": Shape("prompt", "Complete this Python function:\n\n{text}"),
    "gsm8k": Shape("question"),
    "jfleg": Shape(
        None,
        "Copy-edit the following sentence: correct its spelling and grammar and change nothing "
        "else. Answer with the corrected sentence only.\n\n{text}",
    ),
}


class Dataset(Options):
    """One dataset of a benchmark."""

    prompts: str | None = None
    """Its file (``.gz`` too), or ``bundled``; for ``long_documents`` a text file or a folder of
    them; not for ``copy_rate`` and ``needles``, which are made here."""

    field: str | None = None
    """Key of a JSON line that holds the prompt; known datasets know theirs."""

    template: str | None = None
    """Text around each prompt, with ``{text}`` where it goes; known datasets know theirs."""

    limit: int | None = Field(default=None, ge=1)
    """Use this many prompts, spread evenly over the file."""


def load(datasets: Mapping[str, Dataset], chance: random.Random | None = None) -> list[Question]:
    """All questions, dataset by dataset; raises as :func:`.prompts.load`.

    Args:
        datasets: By name.
        chance: Chooses the prompts of a file that is limited, and makes those that are made here;
            without it they are always the same.
    """
    return [
        question for name, dataset in datasets.items() for question in _load(name, dataset, chance)
    ]


def parse(arguments: Iterable[str]) -> dict[str, Dataset]:
    """Datasets of a command line, ``NAME=FILE``, ``NAME=FILE:LIMIT``, ``needles:LIMIT``.

    Raises:
        SpecExtError: A name twice, or one without a file.
    """
    found: dict[str, Dataset] = {}
    for argument in arguments:
        rest, colon, count = argument.rpartition(":")
        if not colon or not count.isdecimal() or not int(count):
            rest, count = argument, ""
        name, equals, file = rest.partition("=")
        if name in found:
            raise SpecExtError(f"dataset {name!r} is given twice")
        if not name or (name in MADE_HERE) == bool(equals) or (equals and not file):
            raise SpecExtError(
                f"dataset {argument!r}: expected NAME=FILE or NAME=FILE:LIMIT, where NAME is "
                f"{', '.join(KNOWN)}, {LONG_DOCUMENTS} or one of your own, or one of "
                f"{', '.join(MADE_HERE)} without a file"
            )
        found[name] = Dataset(prompts=file or None, limit=int(count) if count else None)
    return found


def _load(name: str, dataset: Dataset, chance: random.Random | None) -> list[Question]:
    if name in MADE_HERE:
        if dataset.prompts is not None or dataset.field is not None or dataset.template is not None:
            raise SpecExtError(f"dataset {name} is made here; it takes nothing but a limit")
        if name == NEEDLES:
            return long_context.needle_questions(
                dataset.limit or long_context.DEFAULT_COUNT, chance
            )
        return copy_rate_questions(dataset.limit or 4 * len(COPY_RATES), chance)
    if dataset.prompts is None:
        raise SpecExtError(f"dataset {name!r} has no file; set its 'prompts'")
    if name == LONG_DOCUMENTS:
        if dataset.field is not None:
            raise SpecExtError(f"dataset {name} is cut from text files, which have no 'field'")
        return long_context.document_questions(
            dataset.prompts,
            dataset.limit or long_context.DEFAULT_COUNT,
            template=dataset.template,
            chance=chance,
        )
    shape = KNOWN.get(name, Shape("prompt"))
    template = shape.template if dataset.template is None else dataset.template
    field = shape.field if dataset.field is None else dataset.field
    if field is None:
        questions = prompts.load_lines(
            dataset.prompts, template=template, limit=dataset.limit, chance=chance
        )
    else:
        try:
            questions = prompts.load(
                dataset.prompts, field=field, template=template, limit=dataset.limit, chance=chance
            )
        except prompts.NoFieldError as error:
            raise SpecExtError(
                f"{error.found}; set 'field' of the dataset {name!r} in a --config file"
            ) from error
    found = []
    for question in questions:
        inner = shape.groups.get(question.category, question.category)
        category = name if inner == ALL else name + WITHIN_DATASET + inner
        found.append(replace(question, category=category))
    return found


def copy_rate_questions(count: int, chance: random.Random | None = None) -> list[Question]:
    """Prompts whose answers repeat a known share of them; the same ones unless chance is given."""
    chance = chance or random.Random(0)
    questions = []
    for i in range(count):
        rate = COPY_RATES[i % len(COPY_RATES)]
        text = " ".join(sentence(chance) for _ in range(_SENTENCES))
        kept = _SENTENCES * rate // 100
        if kept == _SENTENCES:
            task = "Write this text again, word for word."
        elif kept:
            task = (
                f"Write the first {kept} sentences of this text again, word for word, and go on "
                f"with {_SENTENCES - kept} new sentences of your own."
            )
        else:
            task = f"Write {_SENTENCES} sentences about something that this text does not mention."
        message = {"role": "user", "content": f"{task}\n\n{text}"}
        category = f"{COPY_RATE}{WITHIN_DATASET}{rate:03d}%"
        questions.append(Question(i + 1, category, (message,)))
    return questions
