# SPDX-License-Identifier: Apache-2.0
"""What a model weighs, by its ``config.json``: weights, KV cache, operations of a row.

For plain decoders of the Llama kind: attention with query, key and value heads, and a gated
feed-forward network. Experts, latent attention and sliding windows are refused rather than guessed;
their figures can be given by hand.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_spec_ext.errors import SpecExtError, UnknownNameError, shown

BY_HAND = ("weights", "kv", "layers")
_HAND_HINT = "give weights=BYTES,kv=BYTES_PER_TOKEN,layers=NUMBER instead"


@dataclass(frozen=True)
class ModelShape:
    """A model as a GPU sees it."""

    name: str
    num_layers: int
    memory_bytes: float  # all weights
    read_bytes: float  # weights that a pass reads: an input embedding is looked up, not read
    kv_bytes: float  # of one token, all layers
    row_flops: float  # operations of one row, attention to others left out
    attention_flops: float  # operations of one row for each token that it attends to

    def in_bits(self, weights: float | None, kv: float | None) -> "ModelShape":
        """With quantised weights or KV cache, from 16 bits; operations stay 16 bits wide."""
        share = 1.0 if weights is None else weights / 16
        return replace(
            self,
            memory_bytes=self.memory_bytes * share,
            read_bytes=self.read_bytes * share,
            kv_bytes=self.kv_bytes * (1.0 if kv is None else kv / 16),
        )


def by_hand(name: str, weights: float, kv: float, layers: int) -> ModelShape:
    """From figures that somebody else counted.

    Args:
        name: For tables.
        weights: Bytes that a pass reads.
        kv: Bytes of a token's KV cache, all layers.
        layers: Transformer layers.

    approximation: 16-bit weights, and as many query heads as KV heads; this matters only where a
    pass waits for operations instead of memory.
    """
    # Two operations a weight of two bytes; four for each value of K (two bytes, as those of V).
    return ModelShape(name, layers, weights, weights, kv, weights, kv)


def from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """From a Hugging Face ``config.json``, in 16 bits.

    Raises:
        SpecExtError: It is no plain decoder, or lacks a size.
    """
    config = {**config, **config.get("text_config", {})}
    odd = [
        key
        for key in ("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank")
        if config.get(key)
    ]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        odd.append("sliding_window")
    if odd:
        raise SpecExtError(
            f"{name}: its config.json has {', '.join(odd)}; expected a plain decoder; {_HAND_HINT}"
        )

    def size(key: str, default: int | None = None) -> int:
        found = config.get(key)
        found = default if found is None else found
        if not isinstance(found, int) or found < 1:
            raise SpecExtError(
                f"{name}: {key} is {shown(found)} in its config.json, expected a size; {_HAND_HINT}"
            )
        return found

    hidden, layers = size("hidden_size"), size("num_hidden_layers")
    heads = size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    head = size("head_dim", hidden // heads)
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    embedding = size("vocab_size") * hidden
    computed = layers * (attention + 3 * hidden * size("intermediate_size")) + embedding
    stored = computed + (0 if config.get("tie_word_embeddings") else embedding)
    return ModelShape(
        name=name,
        num_layers=layers,
        memory_bytes=2.0 * stored,
        read_bytes=2.0 * computed,
        kv_bytes=2.0 * layers * 2 * kv_heads * head,
        row_flops=2.0 * computed,
        attention_flops=4.0 * layers * heads * head,
    )


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


# As in the config.json of each on the Hugging Face Hub; llama-68m is JackFram's.
KNOWN: dict[str, Mapping[str, Any]] = {
    "llama2-7b": _llama(4096, 32, 32, 32, 11008, 32000, False),
    "llama2-13b": _llama(5120, 40, 40, 40, 13824, 32000, False),
    "llama3-8b": _llama(4096, 32, 32, 8, 14336, 128256, False),
    "llama3-70b": _llama(8192, 80, 64, 8, 28672, 128256, False),
    "llama3.2-1b": _llama(2048, 16, 32, 8, 8192, 128256, True),
    "qwen2.5-7b": _llama(3584, 28, 28, 4, 18944, 152064, False),
    "qwen2.5-0.5b": _llama(896, 24, 14, 2, 4864, 151936, True),
    "llama-68m": _llama(768, 2, 12, 12, 3072, 32000, False),
}


def find(text: str) -> ModelShape:
    """A model by name, by its folder or file, or by figures.

    Args:
        text: A name of ``KNOWN``; a folder with ``config.json``, or that file; the name of a model
            that this machine has from the Hugging Face Hub; or ``weights=13.5e9,kv=524288,
            layers=32``.

    Raises:
        SpecExtError: None of these, or a model whose figures must be given.
    """
    if text in KNOWN:
        return from_config(text, KNOWN[text])
    if "=" in text:
        pairs = dict(part.partition("=")[::2] for part in text.split(","))
        return from_pairs({key.strip(): value for key, value in pairs.items()}, text)
    path = _config_file(text)
    if path is None:
        known = UnknownNameError("model", text, KNOWN)
        raise SpecExtError(
            f"{known} Or give a folder with config.json, the name of a model that this machine has "
            f"from the Hugging Face Hub, or {', '.join(f'{key}=NUMBER' for key in BY_HAND)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecExtError(f"cannot read {path}: {error}; expected a config.json") from error
    if not isinstance(config, dict):
        raise SpecExtError(f"{path} holds no object; expected a config.json")
    return from_config(_name_of(text), config)


def from_pairs(pairs: Mapping[str, str], text: str) -> ModelShape:
    """Figures of a command line; raises SpecExtError, which quotes the whole text."""
    try:
        if set(pairs) != set(BY_HAND):
            raise ValueError
        weights, kv = float(pairs["weights"]), float(pairs["kv"])
        layers = int(pairs["layers"])
        if not (0 < weights < float("inf") and 0 < kv < float("inf") and layers > 0):
            raise ValueError
    except ValueError:
        raise SpecExtError(
            f"{text!r}: expected weights=BYTES,kv=BYTES_PER_TOKEN,layers=NUMBER, e.g. "
            "weights=13.5e9,kv=524288,layers=32"
        ) from None
    return by_hand(f"{weights / 1e9:.3g} GB", weights, kv, layers)


def _name_of(text: str) -> str:
    path = Path(text)
    if path.is_file() and path.name == "config.json":
        path = path.absolute().parent
    return path.name if path.exists() else text


def _config_file(text: str) -> Path | None:
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(text, "config.json")
    except ValueError:  # not a name that a hub could know
        return None
    return Path(found) if isinstance(found, str) else None
