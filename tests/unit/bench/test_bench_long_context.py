# SPDX-License-Identifier: Apache-2.0
"""Long prompts: as long as they say, always the same, and with answers that can be checked."""

import gzip
import random
from pathlib import Path

import pytest

from vllm_spec_ext.bench.datasets import Dataset, load, parse
from vllm_spec_ext.bench.long_context import (
    LENGTHS,
    document_questions,
    holds,
    needle_questions,
)
from vllm_spec_ext.bench.made_up_text import sentence
from vllm_spec_ext.errors import SpecExtError


def characters(tokens: int) -> tuple[int, int]:
    """Bounds of a text of so many tokens."""
    return round(tokens * 3.5), round(tokens * 5)


def test_needles_are_in_texts_of_three_lengths() -> None:
    questions = needle_questions(9)
    assert questions == needle_questions(9)
    assert [q.category for q in questions[:3]] == ["needles > 2k", "needles > 4k", "needles > 7k"]
    assert len({q.opening[0]["content"] for q in questions}) == 9
    places = []
    for question in questions:
        text = question.opening[0]["content"]
        number = question.expected
        assert number is not None
        assert text.count(number) == 1
        owner = text.partition(" is " + number)[0].rpartition(" ")[2]
        assert text.endswith(f"What is the secret number of the {owner}?")
        low, high = characters(LENGTHS[question.category[-2:]])
        assert low < len(text) < high
        places.append(text.index(number) / len(text))
    assert min(places) < 0.3
    assert max(places) > 0.7
    assert needle_questions(9, random.Random(7)) != questions


def test_lengths_can_be_chosen(texts: Path) -> None:
    some = {name: LENGTHS[name] for name in ("2k", "7k")}
    for found in (
        needle_questions(4, lengths=some),
        document_questions(str(texts), 4, lengths=some),
    ):
        assert [question.category[-2:] for question in found] == ["2k", "7k"] * 2
    short = {"2k": LENGTHS["2k"]}
    alone = document_questions(str(texts / "a.md"), 1, template="{text}", lengths=short)
    assert len(alone[0].opening[0]["content"]) < characters(2000)[1]  # no more text than it wants


def test_what_an_answer_holds() -> None:
    assert holds("The number is 48,213.", "48213")
    assert not holds("The number is 48214.", "48213")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    chance = random.Random(3)
    for name in ("b.txt", "a.md", "c.txt.gz"):
        paragraphs = [
            " ".join(f"In {name[0]}{i}.{j} {sentence(chance)}" for j in range(9)) for i in range(25)
        ]
        data = "\n\n".join(paragraphs).encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (folder / "table.csv").write_text("1,2,3")
    return folder


def test_documents_are_cut_at_sentences_and_never_twice(texts: Path) -> None:
    questions = document_questions(str(texts), 7, template="{text}")
    assert questions == document_questions(str(texts), 7, template="{text}")
    assert questions[0].opening[0]["content"].startswith((texts / "a.md").read_text()[:50])
    whole = "".join((texts / name).read_text() for name in ("a.md", "b.txt"))
    seen_whole = 0
    for question in questions:
        piece = question.opening[0]["content"]
        low, high = characters(LENGTHS[question.category[-2:]])
        assert low < len(piece) < high
        assert piece.endswith(".")
        sentences = [part for part in piece.replace("\n\n", " ").split(". ") if part]
        assert len(sentences) == len(set(sentences))
        seen_whole += sum(part in whole for part in sentences)
    assert seen_whole > 100
    assert document_questions(str(texts), 7, chance=random.Random(1)) != document_questions(
        str(texts), 7
    )


def test_one_file_without_paragraphs_gives_different_pieces(tmp_path: Path) -> None:
    chance = random.Random(5)
    file = tmp_path / "one.txt"
    file.write_text(" ".join(sentence(chance) for _ in range(900)))
    pieces = {q.opening[0]["content"] for q in document_questions(str(file), 6)}
    assert len(pieces) == 6
    assert all("Summarise this text" in piece for piece in pieces)


def test_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(SpecExtError, match="holds no file that ends in"):
        document_questions(str(tmp_path), 3)
    (tmp_path / "short.txt").write_text("Short.")
    with pytest.raises(SpecExtError, match="holds 6 characters of text, expected at least"):
        document_questions(str(tmp_path), 3)
    with pytest.raises(SpecExtError, match="cannot read"):
        document_questions(str(tmp_path / "none.txt"), 3)
    with pytest.raises(SpecExtError, match="does not contain"):
        document_questions(str(tmp_path), 3, template="none")


def test_as_datasets(texts: Path) -> None:
    questions = load(parse(["needles:4", f"long_documents={texts}:5"]))
    assert [q.category.partition(" > ")[0] for q in questions] == ["needles"] * 4 + [
        "long_documents"
    ] * 5
    assert len(load(parse(["needles"]))) == 12
    mine = Dataset(prompts=str(texts), limit=1, template="Go on:\n{text}")
    (question,) = load({"long_documents": mine})
    assert question.opening[0]["content"].startswith("Go on:\n")
    with pytest.raises(SpecExtError, match="have no 'field'"):
        load({"long_documents": Dataset(prompts=str(texts), field="x")})
    with pytest.raises(SpecExtError, match="needles is made here"):
        load({"needles": Dataset(prompts="x")})
    with pytest.raises(SpecExtError, match="expected NAME=FILE"):
        parse(["long_documents:3"])
    with pytest.raises(SpecExtError, match="expected NAME=FILE"):
        parse(["needles=x"])
