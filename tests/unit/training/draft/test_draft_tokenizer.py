# SPDX-License-Identifier: Apache-2.0
"""A tokenizer cut to its first ids is a whole tokenizer with the same meaning of every id."""

import json
import shutil
from pathlib import Path

import pytest

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.draft.cut_tokenizer import cut_tokenizer
from vllm_spec_ext.training.target import load_tokenizer


def test_ids_keep_their_meaning(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "cut")
    cut_tokenizer(tmp_path / "cut", 290)
    whole, small = load_tokenizer(str(target)), load_tokenizer(str(tmp_path / "cut"))
    assert small.get_vocab() == {t: i for t, i in whole.get_vocab().items() if i < 290}
    assert len(small) == 290
    text = "the quick brown fox sleeps: naïve 東京"
    ids = small(text)["input_ids"]
    assert max(ids) < 290
    assert small.decode(ids) == whole.decode(ids) == text
    assert len(ids) >= len(whole(text)["input_ids"])
    assert small.eos_token_id == whole.eos_token_id == 0


def test_special_tokens_beyond_the_bound_go(target: Path, tmp_path: Path) -> None:
    """Else transformers would give them new ids behind the vocabulary."""
    whole = load_tokenizer(str(target))
    whole.add_special_tokens({"bos_token": "<begin>", "pad_token": "<fill>"})
    whole.save_pretrained(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<begin>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<begin>": {"id": "<begin>", "ids": [320], "tokens": ["<begin>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(str(tmp_path))("the")["input_ids"][0] == 320
    cut_tokenizer(tmp_path, 300)
    small = load_tokenizer(str(tmp_path))
    assert len(small) == 300
    assert small.bos_token is None
    assert small.pad_token is None
    assert max(small("the quick fox")["input_ids"]) < 300


def test_without_a_tokenizer_file(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "cut")
    (tmp_path / "cut" / "tokenizer.json").unlink()
    with pytest.raises(SpecExtError, match=r"has no tokenizer\.json"):
        cut_tokenizer(tmp_path / "cut", 290)
