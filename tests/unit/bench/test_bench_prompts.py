# SPDX-License-Identifier: Apache-2.0
"""Prompt files: shapes, refusals with line numbers, and the bundled prompts."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from vllm_spec_ext.bench import prompts
from vllm_spec_ext.errors import SpecExtError


def _write(folder: Path, *rows: object) -> str:
    path = folder / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _load(
    source: str, field: str = "prompt", template: str | None = None, limit: int | None = None
) -> list[prompts.Question]:
    return prompts.load(source, field=field, template=template, limit=limit)


def test_bundled_prompts_cover_six_categories_evenly() -> None:
    questions = _load(prompts.BUNDLED)
    counts = Counter(question.category for question in questions)
    assert len(questions) == 24
    assert set(counts.values()) == {4}
    assert {"editing", "rewriting", "copy", "correction", "summarise", "code-edit"} == set(counts)
    assert len({q.opening[0]["content"] for q in questions}) == 24


def test_texts_turns_and_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    source = _write(tmp_path, {"x": "a"}, "", {"x": ["a", "b"], "category": "c"}, {"x": messages})
    one, two, three = _load(source, "x")
    assert one == prompts.Question(1, "all", ({"role": "user", "content": "a"},))
    assert (two.line, two.category, two.follow_ups) == (3, "c", ("b",))
    assert three.opening == tuple(messages)


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\u2029four", "five\x85six"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(("\r\n".join(lines) + "\r\n").encode())
    assert [q.opening[0]["content"] for q in _load(str(path))] == texts
    path.write_bytes("one\u2028two\r\n\r\nthree\n".encode())
    found = prompts.load_lines(str(path), template=None, limit=None)
    assert [(q.line, q.opening[0]["content"]) for q in found] == [(1, "one\u2028two"), (3, "three")]


def test_no_category_may_be_null(tmp_path: Path) -> None:
    (question,) = _load(_write(tmp_path, {"prompt": "a", "category": None}))
    assert question.category == prompts.ALL


def test_gzipped_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert _load(str(path))[0].opening == ({"role": "user", "content": "a"},)
    path.write_bytes(b'{"prompt": "a"}\n')
    with pytest.raises(SpecExtError, match="cannot read prompts"):
        _load(str(path))
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n')[:-9])
    with pytest.raises(SpecExtError, match="cannot read prompts"):
        _load(str(path))


def test_files_that_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert _load(str(path))[0].opening == ({"role": "user", "content": "a"},)


def test_template_goes_around_texts_and_leaves_other_braces_alone(tmp_path: Path) -> None:
    source = _write(tmp_path, {"prompt": "f{x}"})
    (question,) = _load(source, template="{a} <{text}>")
    assert question.opening[0]["content"] == "{a} <f{x}>"
    with pytest.raises(SpecExtError, match="does not contain"):
        _load(source, template="no place")


def test_limit_spreads_over_the_file(tmp_path: Path) -> None:
    source = _write(tmp_path, *({"prompt": str(i)} for i in range(10)))
    assert [q.line for q in _load(source, limit=4)] == [1, 3, 6, 8]
    assert len(_load(source, limit=99)) == 10


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{", "line 2: not JSON"),
        ([1], "line 2: found list, expected an object"),
        ({"turns": ["a"]}, "line 2: no field 'prompt'; found 'turns'; choose one with --field"),
        ({"prompt": 3}, "line 2: 'prompt' is 3; expected a text"),
        ({"prompt": []}, r"line 2: 'prompt' is \[\]"),
        ({"prompt": ["a", 1]}, "line 2: 'prompt' is"),
        ({"prompt": "  "}, "line 2: 'prompt' is empty"),
        ({"prompt": "a", "category": 1}, "line 2: 'category' is 1"),
        ({"prompt": "a \ud83d b"}, r"line 2: the 'prompt' holds half a .*, '\\ud83d' at 2; remove"),
        ({"prompt": ["a", "\ude00"]}, "line 2: the 'prompt' holds half a character"),
        ({"prompt": [{"role": "user", "content": "\ud83d"}]}, "line 2: the 'prompt' holds half"),
        ({"prompt": [{"role": "\ud83d", "content": "a"}]}, "line 2: the 'prompt' holds half"),
        ({"prompt": "a", "category": "\ud83d"}, "line 2: the 'category' holds half a character"),
        ('{"prompt": "a", "n": ' + "1" * 5000 + "}", "line 2: not JSON"),
        ('{"prompt": ' + "[" * 100_000, "line 2: not JSON"),
    ],
)
def test_wrong_shapes_name_the_line(tmp_path: Path, row: object, expected: str) -> None:
    source = _write(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(SpecExtError, match=expected):
        _load(source)


def test_both_halves_of_a_character_are_one(tmp_path: Path) -> None:
    (question,) = _load(_write(tmp_path, r'{"prompt": "\ud83d\ude00"}'))
    assert question.opening[0]["content"] == "\U0001f600"


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(SpecExtError, match="cannot read prompts"):
        _load(str(tmp_path / "none.jsonl"))
    with pytest.raises(SpecExtError, match="holds no prompts"):
        _load(_write(tmp_path, ""))


def test_template_is_not_for_messages(tmp_path: Path) -> None:
    source = _write(tmp_path, {"prompt": [{"role": "user", "content": "u"}]})
    with pytest.raises(SpecExtError, match="line 1: --template is for texts"):
        _load(source, template="{text}")


def test_the_digest_sees_what_is_sent(tmp_path: Path) -> None:
    source = _write(tmp_path, {"prompt": "a"})
    plain, around = _load(source), _load(source, template="x{text}")
    assert prompts.digest(plain) == prompts.digest(_load(source))
    assert prompts.digest(plain) != prompts.digest(around)
