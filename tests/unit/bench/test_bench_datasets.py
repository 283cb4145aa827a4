# SPDX-License-Identifier: Apache-2.0
"""Datasets of a benchmark: known files, own files, prompts made here; their names in reports."""

import gzip
import json
from pathlib import Path

import pytest

from vllm_spec_ext.bench.datasets import COPY_RATES, Dataset, copy_rate_questions, load, parse
from vllm_spec_ext.bench.settings import merge
from vllm_spec_ext.errors import SpecExtError


def lines(path: Path, rows: list[dict[str, object]]) -> str:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "dev.src").write_text("I is here .\n\nThey was late .\n")
    return {
        "spec_bench": lines(
            tmp_path / "question.jsonl",
            [
                {"question_id": 81, "category": "writing", "turns": ["Compose.", "Again."]},
                {"question_id": 91, "category": "math", "turns": ["Add {one}."]},
                {"question_id": 401, "category": "math_reasoning", "turns": ["How many?"]},
            ],
        ),
        "humaneval": lines(tmp_path / "HumanEval.jsonl.gz", [{"prompt": "def f(a={}):\n"}]),
        "gsm8k": lines(tmp_path / "train.jsonl", [{"question": "How many?", "answer": "3"}]),
        "jfleg": str(tmp_path / "dev.src"),
    }


def test_known_files_are_read_without_further_words(files: dict[str, str]) -> None:
    questions = load(parse(f"{name}={file}" for name, file in files.items()))
    assert [q.category for q in questions] == [
        "spec_bench > mt_bench",
        "spec_bench > mt_bench",
        "spec_bench > math_reasoning",
        "humaneval",
        "gsm8k",
        "jfleg",
        "jfleg",
    ]
    assert questions[0].follow_ups == ("Again.",)
    assert questions[3].opening[0]["content"] == "Complete this Python function:\n\ndef f(a={}):\n"
    assert questions[4].opening[0]["content"] == "How many?"
    assert questions[6].opening[0]["content"].endswith("\n\nThey was late .")


def test_a_limit_is_part_of_the_argument(files: dict[str, str]) -> None:
    questions = load(parse([f"spec_bench={files['spec_bench']}:1", "copy_rate:7"]))
    assert len(questions) == 1 + 7


def test_own_files_say_how_they_are_read(files: dict[str, str]) -> None:
    (question,) = load(
        {"mine": Dataset(prompts=files["gsm8k"], field="answer", template="Is it {text}?")}
    )
    assert question.category == "mine"
    assert question.opening[0]["content"] == "Is it 3?"


def test_settings_take_files_and_more(files: dict[str, str]) -> None:
    given = {"gsm8k": files["gsm8k"], "copy_rate": {"limit": 5}}
    settings = merge({"model": "m", "datasets": given}, {})
    assert len(settings.questions()) == 6
    assert settings.source() == "gsm8k, copy_rate"
    with pytest.raises(SpecExtError, match="field belongs to the one file"):
        merge({"model": "m", "datasets": given, "field": "x"}, {})
    assert len(merge({"model": "m", "datasets": given}, {"limit": 3}).questions()) == 3


def test_flags_win_over_the_file_also_about_where_prompts_come_from(files: dict[str, str]) -> None:
    flag = {"datasets": parse(["copy_rate:2"])}
    assert len(merge({"model": "m", "prompts": "x.jsonl", "field": "y"}, flag).questions()) == 2
    one_file = {"prompts": files["gsm8k"], "field": "question"}
    assert len(merge({"model": "m", "datasets": {"copy_rate": {}}}, one_file).questions()) == 1


def test_copy_rates_are_what_they_say() -> None:
    questions = copy_rate_questions(10)
    assert questions == copy_rate_questions(10)
    assert [q.category for q in questions[:5]] == [f"copy_rate > {r:03d}%" for r in COPY_RATES]
    assert len({q.opening[0]["content"] for q in questions}) == 10
    quarter = questions[1].opening[0]["content"]
    assert "first 2 sentences" in quarter
    assert quarter.split("\n\n")[1].count(".") == 8


@pytest.mark.parametrize(
    "argument", ["gsm8k", "=file", "gsm8k=", "copy_rate=file", "gsm8k:5", "", "copy_rate:0"]
)
def test_bad_arguments(argument: str) -> None:
    with pytest.raises(SpecExtError, match="expected NAME=FILE or NAME=FILE:LIMIT"):
        parse([argument])


def test_a_name_twice() -> None:
    with pytest.raises(SpecExtError, match="'a' is given twice"):
        parse(["a=x", "a=y"])


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ({"gsm8k": Dataset()}, "has no file"),
        ({"copy_rate": Dataset(field="x")}, "nothing but a limit"),
        ({"mine": Dataset(prompts="FILE", field="q")}, "no field 'q'.*set 'field' of the dataset"),
        ({"gsm8k": Dataset(prompts="missing.jsonl")}, "cannot read prompts 'missing.jsonl'"),
        ({"jfleg": Dataset(prompts="x", template="none")}, "does not contain"),
    ],
)
def test_bad_datasets(dataset: dict[str, Dataset], words: str, files: dict[str, str]) -> None:
    for name, given in dataset.items():
        if given.prompts == "FILE":
            dataset = {name: given.model_copy(update={"prompts": files["gsm8k"]})}
    with pytest.raises(SpecExtError, match=words):
        load(dataset)
