# SPDX-License-Identifier: Apache-2.0
"""Prompts of two, four and seven thousand tokens: needles in made-up text, and text files.

A **needle** is a sentence with a number, somewhere in sentences that say nothing of it; the prompt
asks for the number, so whether an answer holds it can be told without a judge (the pass-key task of
Mohtashami and Jaggi 2023). A view of the KV cache that keeps only recent tokens loses it.

**Long documents** are pieces of text files, one after the other; the prompt asks for a summary.

Lengths are counted by characters, for English and a tokenizer like SmolLM2's; they are a little
less than they say, so that 7k leaves room for an answer within 8192 tokens.
"""

import random
from collections.abc import Mapping
from pathlib import Path

from vllm_spec_ext.bench import prompts
from vllm_spec_ext.bench.made_up_text import sentence
from vllm_spec_ext.bench.prompts import PLACEHOLDER, WITHIN_DATASET, Question
from vllm_spec_ext.errors import SpecExtError

NEEDLES = "needles"
LONG_DOCUMENTS = "long_documents"
LENGTHS = {"2k": 2000, "4k": 4000, "7k": 7000}  # tokens of a prompt
DEFAULT_COUNT = 4 * len(LENGTHS)
SUMMARY = (
    "Summarise this text in a few sentences, and quote the sentences of it that matter most.\n\n"
    + PLACEHOLDER
)
_NEEDLE_CHARACTERS = 4.6  # a token of the made-up sentences has so many
_PROSE_CHARACTERS = 4.5  # English prose has 4.3 to 5.3
_SUFFIXES = (".txt", ".md", ".gz")
_OWNERS = ("lighthouse", "library", "museum", "bakery", "castle", "railway", "theatre", "school")


def needle_questions(
    count: int, chance: random.Random | None = None, *, lengths: Mapping[str, int] = LENGTHS
) -> list[Question]:
    """Prompts that ask for a number hidden in them; the same ones unless chance is given.

    Args:
        count: Prompts; their lengths take turns.
        chance: Chooses words, numbers and places.
        lengths: Name and tokens of each length.
    """
    chance = chance or random.Random(0)
    questions = []
    for i in range(count):
        name, tokens = list(lengths.items())[i % len(lengths)]
        owner, number = chance.choice(_OWNERS), str(chance.randrange(10_000, 100_000))
        sentences = []
        length = 0
        while length < tokens * _NEEDLE_CHARACTERS:
            sentences.append(sentence(chance))
            length += len(sentences[-1]) + 1
        needle = f"The secret number of the {owner} is {number}."
        sentences.insert(chance.randrange(len(sentences) + 1), needle)
        task = (
            "There is a secret number in this text. Find it and remember it.\n\n"
            f"{' '.join(sentences)}\n\nWhat is the secret number of the {owner}?"
        )
        message = {"role": "user", "content": task}
        category = f"{NEEDLES}{WITHIN_DATASET}{name}"
        questions.append(Question(i + 1, category, (message,), expected=number))
    return questions


def document_questions(
    source: str,
    count: int,
    *,
    template: str | None = None,
    chance: random.Random | None = None,
    lengths: Mapping[str, int] = LENGTHS,
) -> list[Question]:
    """Prompts about pieces of text files; the same ones unless chance is given.

    Args:
        source: A text file, or a folder whose files (``.txt``, ``.md``, and these gzipped) are
            read in order of their names, as one text.
        count: Prompts; their pieces begin at places spread evenly over the text.
        template: Text around each piece, with ``{text}`` where it goes; None asks for a summary.
        chance: Chooses where the pieces begin.
        lengths: Name and tokens of each length; they take turns.

    Raises:
        SpecExtError: No such files, or less text than the longest prompt wants.
    """
    template = SUMMARY if template is None else template
    prompts.check_template(template)
    text = "\n\n".join(prompts.read_text(str(path)).strip() for path in _files(source))
    wanted = round(max(lengths.values()) * _PROSE_CHARACTERS)
    if len(text) < wanted:
        raise SpecExtError(
            f"{source} holds {len(text)} characters of text, expected at least {wanted}, the "
            "longest prompt's; add files"
        )
    questions = []
    for i in range(count):
        name, tokens = list(lengths.items())[i % len(lengths)]
        place = i * len(text) // count if chance is None else chance.randrange(len(text))
        message = {
            "role": "user",
            "content": template.replace(
                PLACEHOLDER, _piece(text, place, round(tokens * _PROSE_CHARACTERS))
            ),
        }
        category = f"{LONG_DOCUMENTS}{WITHIN_DATASET}{name}"
        questions.append(Question(i + 1, category, (message,)))
    return questions


def _files(source: str) -> list[Path]:
    path = Path(source)
    if not path.is_dir():
        return [path]
    found = sorted(entry for entry in path.iterdir() if entry.suffix in _SUFFIXES)
    if not found:
        raise SpecExtError(f"{source} holds no file that ends in {', '.join(_SUFFIXES)}")
    return found


def _piece(text: str, place: int, length: int) -> str:
    """From the beginning of a sentence or line, to the last sentence that fits.

    Behind the end of the text it goes on with its beginning; never is anything in it twice.
    """
    start = max(text.rfind("\n", 0, place), text.rfind(". ", 0, place) + 1) + 1 if place else 0
    piece = (text[start:] + "\n\n" + text[:start].rstrip())[:length]
    ends = [piece.rfind(end) for end in (". ", ".\n", "\n\n")]
    return piece[: max(ends) + 1].rstrip() if max(ends) > length // 2 else piece


def holds(answer: str, expected: str) -> bool:
    """Whether an answer holds what was asked for; a number may have commas."""
    return expected in answer.replace(",", "")
