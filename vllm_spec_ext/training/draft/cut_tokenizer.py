# SPDX-License-Identifier: Apache-2.0
"""The target's tokenizer with the ids below a bound only.

Byte-level BPE numbers its tokens in the order of its merges, each made of earlier ones. So the
first N ids are a tokenizer of their own, which splits rare words finer, and every id means what it
means to the target. A draft folder with such a tokenizer is whole: transformers loads it, and vLLM
runs it (``use_heterogeneous_vocab``, as ``vocab_size`` differs).
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from vllm_spec_ext.atomic import read_json, write_json
from vllm_spec_ext.errors import SpecExtError

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
_PROBE = "The quick brown fox can't jump over 1234.5 lazy dogs;\n\tdef f(x): naïve 東京 🙂"


def cut_tokenizer(folder: Path, size: int) -> None:
    """Cut the tokenizer files in a folder to the ids below ``size``, in place.

    Raises:
        SpecExtError: The tokenizer has no ``tokenizer.json``, or does not work without the rest.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        raise SpecExtError(
            f"the target's tokenizer has no {TOKENIZER}, so --vocab cannot cut it; drop --vocab"
        )
    spec = read_json(path)
    lost = {token["content"] for token in spec.get("added_tokens", []) if token["id"] >= size}
    spec["added_tokens"] = [t for t in spec.get("added_tokens", []) if t["id"] < size]
    _cut_model(spec["model"], size)
    if any(_names(spec.get("post_processor"), token) for token in lost):
        spec["post_processor"] = None  # it would add a token that there is no more
    write_json(path, spec)
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        config["added_tokens_decoder"] = {i: t for i, t in decoder.items() if int(i) < size}
    for name, value in list(config.items()):
        if name.endswith("_token") and _content(value) in lost:
            del config[name]
        elif isinstance(value, list) and name.endswith("special_tokens"):
            config[name] = [token for token in value if _content(token) not in lost]
    write_json(folder / CONFIG, config)
    _check(folder, size)


def check_can_be_cut(tokenizer: Any, size: int) -> None:
    """Cut a copy of a tokenizer: what is wrong with it shows before hours of training.

    Raises:
        SpecExtError: As of :func:`cut_tokenizer`.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        cut_tokenizer(Path(folder), size)


def _cut_model(model: dict[str, Any], size: int) -> None:
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        vocab = model["vocab"] = {token: i for token, i in vocab.items() if i < size}
        merges = model.get("merges", [])
        pairs = [m.split(" ", 1) if isinstance(m, str) else m for m in merges]
        whole = [all(t in vocab for t in (a, b, a + b)) for a, b in pairs]
        if merges:
            model["merges"] = [merge for merge, kept in zip(merges, whole, strict=True) if kept]
        if model.get("unk_token") is not None and model["unk_token"] not in vocab:
            model["unk_token"] = None
    elif isinstance(vocab, list):  # Unigram: the id is the place
        model["vocab"] = vocab[:size]


def _names(value: Any, token: str) -> bool:
    return json.dumps(token, ensure_ascii=False) in json.dumps(value, ensure_ascii=False)


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _check(folder: Path, size: int) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        ids = [*tokenizer(_PROBE)["input_ids"], *tokenizer.get_vocab().values()]
    except Exception as error:  # tokenizers raises plain Exception
        raise SpecExtError(
            f"the target's tokenizer does not work with its first {size} tokens ({error}); "
            "drop --vocab"
        ) from error
    if max(ids) >= size:
        raise SpecExtError(
            f"the target's tokenizer, cut to {size} tokens, still gives id {max(ids)}; drop --vocab"
        )
