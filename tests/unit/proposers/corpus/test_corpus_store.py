# SPDX-License-Identifier: Apache-2.0
"""The base store: rows counted by hand, round trip, refusal of everything that is not intact."""

import gzip
import itertools
import json
import time
from collections import Counter as PyCounter
from pathlib import Path

import numpy as np
import pytest

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import fingerprint, tokenizer_fingerprint
from vllm_spec_ext.proposers.corpus.build import BuildSettings, build_store, encode, tokenised
from vllm_spec_ext.proposers.corpus.counting import Counter
from vllm_spec_ext.proposers.corpus.documents import read_documents
from vllm_spec_ext.proposers.corpus.store import (
    FILE_NAME,
    HEADER_BYTES,
    PROB_TABLE,
    NgramStore,
    quantise,
)


class WordTokenizer:
    """Words ``w0``, ``w1``, … are ids 0, 1, …; anything else is the last id."""

    def __init__(self, size: int = 40, salt: str = "") -> None:
        self.size, self.salt = size, salt

    def get_vocab(self) -> dict[str, int]:
        return {f"{self.salt}w{i}": i for i in range(self.size)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        vocab = self.get_vocab()
        return [vocab.get(self.salt + word, self.size - 1) for word in text.split()]


def text_of(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def build(out: Path, documents: list[list[int]], **settings: int) -> NgramStore:
    items = [(text_of(ids), 1) for ids in documents]
    pieces = tokenised(items, WordTokenizer())
    return build_store(pieces, WordTokenizer(), out, BuildSettings(**settings))


def near(row: list[tuple[int, float]], expected: dict[int, float]) -> None:
    assert [token for token, _ in row] == list(expected)
    for token, prob in row:
        assert prob == pytest.approx(expected[token], rel=0.025)


def test_rows_counted_by_hand(tmp_path: Path) -> None:
    # 1 2 -> 3 twice, -> 4 once; nothing spans the two documents; 3 1 occurs once: dropped.
    store = build(tmp_path, [[1, 2, 3, 1, 2, 4], [1, 2, 3]])
    near(store.row(1, 2), {3: 2 / 3, 4: 1 / 3})
    assert store.row(2, 3) == []  # seen once as a context
    assert store.row(4, 1) == []
    sentinel = store.header.vocab_size
    near(store.row(sentinel, 2), {3: 2 / 3, 4: 1 / 3})
    near(store.row(sentinel, 1), {2: 1.0})
    assert store.arrays.uni_tok[:3].tolist() == [1, 2, 3]
    assert store.header.num_tokens == 9
    assert store.header.num_documents == 2
    kept = build(tmp_path / "all", [[1, 2, 3, 1, 2, 4], [1, 2, 3]], min_count_bigram=1)
    near(kept.row(2, 3), {1: 1.0})


def test_top_k_and_rare_successors(tmp_path: Path) -> None:
    documents = [[1, 2, 3]] * 3 + [[1, 2, 4]] * 2 + [[1, 2, 5]]
    store = build(tmp_path, documents, top_k=2)
    near(store.row(1, 2), {3: 3 / 6, 4: 2 / 6})
    store = build(tmp_path, documents, min_count_trigram=3)
    near(store.row(1, 2), {3: 3 / 6})


def test_external_merge_equals_counting_in_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 12, 700) for _ in range(30)]
    counter = Counter(40, tmp_path, memory_bytes=1)  # the smallest buffer: many runs
    expected: PyCounter[int] = PyCounter()
    for document in documents:
        counter.add(document.astype(np.uint64))
        ids = document.tolist()
        expected.update((40 << 42) | (a << 21) | b for a, b in itertools.pairwise(ids))
        expected.update(
            (a << 42) | (b << 21) | c for a, b, c in zip(ids, ids[1:], ids[2:], strict=False)
        )
    found: list[tuple[int, int]] = []
    for keys, counts in counter.merged():
        found += zip(keys.tolist(), counts.tolist(), strict=True)
    assert len(counter.runs) > 5
    assert found == sorted(expected.items())


def test_quantisation_error_is_small_and_keeps_the_order() -> None:
    probs = np.linspace(1.0, 0.001, 999)
    decoded = PROB_TABLE[quantise(probs)]
    assert np.abs(decoded / probs - 1).max() < 0.023
    assert (np.diff(decoded) <= 0).all()


def test_opens_fast_and_verifies(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    store = build(tmp_path, [rng.integers(0, 39, 5000).tolist()])
    start = time.perf_counter()
    again = NgramStore(tmp_path)
    assert time.perf_counter() - start < 0.05
    again.verify()
    assert again.header == store.header
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]  # no temporary file is left


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def test_refuses_damage(tmp_path: Path) -> None:
    store = build(tmp_path, [[1, 2, 3, 1, 2, 3, 1, 2, 3]])
    path, intact = store.path, store.path.read_bytes()
    tok = store.header.sections["tok"][0]
    del store
    path.write_bytes(intact[:-10])
    with pytest.raises(SpecExtError, match="cut short"):
        NgramStore(path)
    path.write_bytes(intact[:100])
    with pytest.raises(SpecExtError, match="expected b'VSXNGRAM'"):
        NgramStore(path)
    for offset, message in ((0, "VSXNGRAM"), (8, "version"), (12, "byte order"), (60, "header")):
        path.write_bytes(intact)
        damage(path, offset)
        with pytest.raises(SpecExtError, match=message):
            NgramStore(path)
    path.write_bytes(intact)
    damage(path, HEADER_BYTES)  # top[0]
    with pytest.raises(SpecExtError, match="damaged"):
        NgramStore(path)
    path.write_bytes(intact)
    damage(path, tok)  # only a full read finds this
    with pytest.raises(SpecExtError, match="CRC"):
        NgramStore(path).verify()
    with pytest.raises(SpecExtError, match="corpus build"):
        NgramStore(tmp_path / "missing")


@pytest.mark.parametrize("name", ["tok", "prob", "uni_tok", "uni_prob"])
def test_refuses_tables_of_different_lengths(name: str, tmp_path: Path) -> None:
    """As a file of other code might have, whose checksums are right."""
    store = build(tmp_path, [[1, 2, 3, 1, 2, 3, 1, 2, 3]])
    store.arrays = store.arrays._replace(**{name: getattr(store.arrays, name)[:-1]})
    with pytest.raises(SpecExtError, match="do not agree"):
        store._check()


def test_empty_corpus_leaves_an_older_store_alone(tmp_path: Path) -> None:
    build(tmp_path, [[1, 2, 3, 1, 2, 3]])
    with pytest.raises(SpecExtError, match="empty"):
        build(tmp_path, [])
    NgramStore(tmp_path).verify()


def test_fingerprint_depends_on_vocabulary_and_splitting() -> None:
    base = tokenizer_fingerprint(WordTokenizer())
    assert base == tokenizer_fingerprint(WordTokenizer())
    assert base != tokenizer_fingerprint(WordTokenizer(41))
    assert base != tokenizer_fingerprint(WordTokenizer(salt="x"))
    assert fingerprint({"a": 0}, [0]) != fingerprint({"a": 0}, [0, 0])
    with pytest.raises(SpecExtError, match="get_vocab"):
        tokenizer_fingerprint(object())


def test_documents(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": ["b", {"role": "user", "content": "c"}]}]
    jsonl = tmp_path / "x.jsonl"
    jsonl.write_text("\n".join(map(json.dumps, rows)))
    assert [text for text, _ in read_documents(jsonl, "text")] == ["a", "b", "c"]
    assert sum(size for _, size in read_documents(jsonl, "text")) == jsonl.stat().st_size
    with pytest.raises(SpecExtError, match=r"line 1.*--field"):
        list(read_documents(jsonl, "body"))
    jsonl.write_text('{"text": "a"}\n{"text": ["b", "c\\ud83d"]}\n')
    with pytest.raises(SpecExtError, match=r"x.jsonl, line 2, .*half a character, '\\ud83d' at 1;"):
        list(read_documents(jsonl, "text"))
    text = tmp_path / "x.txt"
    text.write_text("line\n" * 50_000)
    pieces = [piece for piece, _ in read_documents(text, "")]
    assert len(pieces) == 4
    assert "".join(pieces) == text.read_text()
    text.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(SpecExtError, match="UTF-8"):
        list(read_documents(text, ""))
    text.write_bytes(b"\xef\xbb\xbfa")  # a byte order mark is no part of the text
    assert [piece for piece, _ in read_documents(text, "")] == ["a"]
    packed = tmp_path / "x.txt.gz"
    damaged = bytearray(gzip.compress(np.random.default_rng(0).bytes(5000).hex().encode()))
    damaged[200:300] = b"\xff" * 100
    packed.write_bytes(damaged)
    with pytest.raises(SpecExtError, match=r"cannot read .*x\.txt\.gz"):
        list(read_documents(packed, ""))


def test_texts_are_neither_cut_nor_filled_up() -> None:
    """Whatever the tokenizer was saved with; repositories of trained models often say 512."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    words.enable_truncation(3)
    words.enable_padding(length=3)
    found = encode(PreTrainedTokenizerFast(tokenizer_object=words), ["a b a b a", "b"])
    assert [ids.tolist() for ids in found] == [[2, 3, 2, 3, 2], [3]]
