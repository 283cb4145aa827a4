# SPDX-License-Identifier: Apache-2.0
"""Prompt files: their shapes, and what is wrong with those that are refused."""

import gzip
import json
from pathlib import Path

import pytest

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.prompts import read_prompts

RECORDS = '{"q": "one"}\n{"q": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.ndjson", RECORDS),
        ("p.JSONL", RECORDS),
        ("p.json", RECORDS),  # as many data sets call it
        ("p.json", '\n [{"q": "one"},\n {"q": "two"}]'),
        ("p.json", '["one", "two"]'),
        ("p.jsonl", "\ufeff" + RECORDS),
        ("p.txt", "\ufeffone\ntwo\n"),
    ],
)
def test_shapes(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert read_prompts([tmp_path / name], "q") == ["one", "two"]
    packed = tmp_path / f"{name}.GZ"
    packed.write_bytes(gzip.compress(content.encode()))
    assert read_prompts([packed], "q") == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.csv", "q\none\n", r"\.csv files are not read.*pandas.read_csv\('p.csv'\)"),
        ("p.parquet", "PAR1", r"pandas.read_parquet"),
        ("p.json", '[{"q": "one"}, {"p": "two"}]', r"p.json:2: no 'q' in this line"),
        ("p.json", '[{"q": "one"},', r"p.json:1: not a JSON object.*belongs in a .txt file"),
        ("p.jsonl", '{"q": "\\ud800"}', r"p.jsonl:1: the prompt holds half a character"),
        ("p.jsonl", "[" * 100_000, r"p.jsonl:1: not a JSON object"),
        ("p.jsonl", "\n", r"no prompts in .*p.jsonl; expected lines like"),
    ],
)
def test_refusals_say_how_to_mend_it(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SpecExtError, match=message):
        read_prompts([tmp_path / name], "q")


def test_damaged_gzip(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(json.dumps({"q": "x" * 50}).encode() * 50, mtime=0))
    packed[12:40] = b"\xff" * 28
    (tmp_path / "p.jsonl.gz").write_bytes(packed)
    with pytest.raises(SpecExtError, match="damaged gzip file"):
        read_prompts([tmp_path / "p.jsonl.gz"], "q")
