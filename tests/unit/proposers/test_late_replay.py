# SPDX-License-Identifier: Apache-2.0
"""``scripts/late_tables.py``: as many tokens a step late as at once, and fewer by an old query."""

import random
from pathlib import Path

import pytest
from number_corpus import NumberTokenizer, build_corpus

import late_tables
from vllm_spec_ext.cli.simulate import make_points
from vllm_spec_ext.replay import Recording


def recordings() -> list[Recording]:
    """Copies of a prompt in which every tenth token is another."""
    draw = random.Random(3)
    found = []
    for _ in range(4):
        prompt = [draw.randrange(40, 90) for _ in range(60)]
        answer = [draw.randrange(40) if draw.random() < 0.1 else token for token in prompt]
        found.append(Recording(prompt, answer, "copies"))
    return found


@pytest.mark.parametrize("method", ["input_copy", "adaptive_ngram"])
def test_no_draft_is_lost(method: str) -> None:
    options = {**late_tables.METHODS[method], "num_speculative_tokens": 6}
    [point] = make_points(method, [options])
    found = late_tables.figures(method, recordings(), point, None, "MODEL")
    sync, behind, late, old = (found[design] for design in late_tables.DESIGNS)
    assert sync > 2.0
    assert behind >= 0.97 * sync
    assert late >= 0.98 * sync
    assert old < 0.7 * sync
    table = late_tables.table({"copies": found}, {"copies": 4})
    assert f"| copies, 4 | {sync:.3f} | {behind:.3f} (" in table


def test_auto_late_copies_from_the_answer_right_before() -> None:
    pytest.importorskip("triton")
    draw = random.Random(5)
    said = [[draw.randrange(40, 90) for _ in range(30)] for _ in range(4)]
    asked = [Recording([i, i, i], text, "again") for i, text in enumerate(said) for _ in range(2)]
    [point] = make_points("auto", [{**late_tables.METHODS["auto"], "num_speculative_tokens": 6}])
    found = late_tables.figures("auto", asked, point, NumberTokenizer(100), "MODEL")
    assert found["late tables"] > 1.5, "every second answer is the one before"


def test_auto_late_drafts_all_tokens_behind_one_that_was_replaced() -> None:
    pytest.importorskip("triton")
    draw = random.Random(6)
    texts = [[draw.randrange(40, 90) for _ in range(60)] for _ in range(4)]
    edited = [[3 + i // 9 if i % 9 == 8 else t for i, t in enumerate(text)] for text in texts]
    asked = [Recording(text, said, "edit") for text, said in zip(texts, edited, strict=True)]
    alone = {"own_text": False, "earlier_answers": 0}
    options = {**late_tables.METHODS["auto"], **alone, "num_speculative_tokens": 8}
    [point] = make_points("auto", [options])
    found = late_tables.figures("auto", asked, point, NumberTokenizer(100), "MODEL")
    assert found["late tables"] > 6.0, "not four tokens behind it"


def test_auto_drafts_from_a_corpus_late(tmp_path: Path) -> None:
    """In chains where it waits for nothing, nearly as well as in trees where it waits."""
    pytest.importorskip("triton")
    draw = random.Random(4)
    said = [[draw.randrange(3, 99) for _ in range(40)] for _ in range(6)]
    asked = [Recording([draw.randrange(3, 99) for _ in range(20)], text, "new") for text in said]
    tokenizer = NumberTokenizer(100)
    build_corpus(tmp_path, said * 2, 100)
    found = []
    for more in ({}, {"corpus": str(tmp_path)}):
        options = {**late_tables.METHODS["auto"], **more, "num_speculative_tokens": 6}
        [point] = make_points("auto", [options])
        found.append(late_tables.figures("auto", asked, point, tokenizer, "MODEL"))
    alone, with_corpus = found
    assert alone["late tables"] < 1.2, "nothing is said twice"
    assert with_corpus["late tables"] > 3.0
    assert with_corpus["late tables"] > 0.9 * with_corpus["synchronous"]
    assert "| new, 6 | " in late_tables.table({"new": with_corpus}, {"new": 6})
