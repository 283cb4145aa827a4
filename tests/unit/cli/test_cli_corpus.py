# SPDX-License-Identifier: Apache-2.0
"""`vllm-spec corpus`: stores of text, and of a target's answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from number_corpus import NumberTokenizer
from typer.testing import CliRunner

from vllm_spec_ext.cli.corpus import corpus_app
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import tokenizer_fingerprint
from vllm_spec_ext.proposers.corpus.store import NgramStore
from vllm_spec_ext.training import stages
from vllm_spec_ext.training.schema import Training
from vllm_spec_ext.training.shards import TokenSequence, open_manifest, shard_path, write_shard

V = 20


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> NumberTokenizer:
    found = NumberTokenizer(V)
    monkeypatch.setattr("vllm_spec_ext.cli.corpus.load_tokenizer", lambda name: found)
    return found


def run(*words: str) -> str:
    return CliRunner().invoke(corpus_app, [*words], catch_exceptions=False).stdout


def answered(folder: Path, *sequences: tuple[list[int], list[int]], size: int = V) -> str:
    """A folder as training's data stage leaves it."""
    facts = {"tokenizer_fingerprint": tokenizer_fingerprint(NumberTokenizer(size)), "model": "M"}
    open_manifest(folder, {"num_shards": 1, **facts})
    texts = [TokenSequence([*prompt, *answer], len(prompt)) for prompt, answer in sequences]
    write_shard(shard_path(folder, 0), texts)
    return str(folder)


def built(out: Path, *inputs: str) -> NgramStore:
    given = [word for path in inputs for word in ("--input", path)]
    run("build", "--tokenizer", "t", *given, "--out", str(out), "--quiet")
    return NgramStore(out)


def test_answers_are_counted_from_the_end_of_their_prompts_on(tmp_path: Path) -> None:
    # Twice, as contexts that occur once are left out. 2 3 is the end of the prompt.
    folder = answered(tmp_path / "answers", *[([0, 1, 2, 3], [4, 5, 6])] * 2, ([9], [8, 7]))
    store = built(tmp_path / "store", folder)
    for context, token in (((2, 3), 4), ((3, 4), 5), ((4, 5), 6)):
        assert [one for one, _ in store.row(*context)] == [token]
    assert not store.row(1, 2)  # of the prompt's beginning nothing is counted
    assert (store.header.num_documents, store.header.num_tokens) == (3, 13)


def test_text_and_answers_make_one_store(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("4 5 6\n")
    folder = answered(tmp_path / "answers", ([1], [4, 5, 6]))
    assert [one for one, _ in built(tmp_path / "store", str(text), folder).row(4, 5)] == [6]


def test_a_token_without_a_name_ends_what_is_counted(tmp_path: Path) -> None:
    """Of a vocabulary that was padded: it is in no text, and no store has room for it."""
    folder = answered(tmp_path / "answers", *[([1], [2, 3, V + 1, 4, 5])] * 2)
    store = built(tmp_path / "store", folder)
    assert [one for one, _ in store.row(1, 2)] == [3]
    assert store.row(V, 3) == []
    assert [one for one, _ in store.row(V, 4)] == [5]


def test_what_cannot_be_an_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    foreign = answered(tmp_path / "foreign", ([1], [2, 3]), size=V - 1)
    unfinished = tmp_path / "unfinished"
    open_manifest(unfinished, {"num_shards": 2})
    for path, expected in (
        (tmp_path / "missing", "no such input file"),
        (tmp_path / "empty", r"found a folder, expected its files, or .* manifest.json"),
        (foreign, r"answers in .* \(of M\) was made with another tokenizer"),
        (unfinished, "2 of 2 shards are missing"),
    ):
        with pytest.raises(SpecExtError, match=expected):
            built(tmp_path / "store", str(path))
    assert not list((tmp_path / "store").glob("*"))


def test_a_target_answers_and_its_answers_are_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: NumberTokenizer
) -> None:
    asked: list[Training] = []

    class Continues:
        """Counts on from a prompt's last token."""

        def __init__(self, config: Training) -> None:
            asked.append(config)

        def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
            return [[ids[-1] + 1, ids[-1] + 2, ids[-1] + 3] for ids in prompts]

    class Called(NumberTokenizer):
        def __call__(self, text: str, **given: Any) -> dict[str, list[int]]:
            return {"input_ids": self.encode(text)}

    monkeypatch.setattr(stages, "vllm_generator", Continues)
    monkeypatch.setattr(stages, "load_tokenizer", lambda name: Called(V))
    monkeypatch.setattr("vllm_spec_ext.training.distill.weights_fingerprint", lambda model: "w")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"q": "1 2 3"}) + "\n" for _ in range(3)))
    out = tmp_path / "corpus"
    given = ["--model", "M", "--prompts", str(prompts), "--field", "q", "--out", str(out)]
    said = run("answers", *given, "--max-prompts", "2", "--max-new-tokens", "7", "--quiet")
    assert "10 tokens of 2 documents" in said.replace("\n", "")
    assert f'"corpus": "{out}"' in said
    assert [one for one, _ in NgramStore(out).row(3, 4)] == [5]
    assert (asked[0].max_new_tokens, asked[0].max_prompts) == (7, 2)
    again = run("answers", *given, "--max-prompts", "2", "--max-new-tokens", "7", "--quiet")
    assert "all 1 shards are there" in again
    assert len(asked) == 1  # nothing is answered twice
    with pytest.raises(SpecExtError, match=r"max.new.tokens"):
        run("answers", *given, "--max-new-tokens", "1")
    with pytest.raises(SpecExtError, match="generator"):
        run("answers", *given, "--generator", "someone")
