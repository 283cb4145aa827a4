# SPDX-License-Identifier: Apache-2.0
"""Put a small Llama model into the body of a large one: its texts, at the large one's speed.

What a draft is worth depends on the text, what a step takes on the size of the model. A checkpoint
of random weights has the size and says nothing; this one says what the small model says. Its
weights stand in a corner of random ones that change nothing, as all that would reach the rest of
the residual stream is zero. RMSNorm divides by the mean over the whole stream, which norm weights
and epsilon take back, so texts are the small model's up to rounding.

    python scripts/wide_body.py ~/.cache/vllm-spec-ext/SmolLM2-135M-Instruct wide --hidden 4608 \\
        --intermediate 9216 --layers 32 --groups 4
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SPREAD = 0.02  # of the random weights
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "*.jinja", "generation_config.json")


def wide_config(small: Mapping[str, Any], sizes: argparse.Namespace) -> dict[str, Any]:
    """The configuration of the large model.

    Raises:
        SystemExit: Something does not fit.
    """
    heads = int(small["num_attention_heads"])
    if small["model_type"] != "llama":
        raise SystemExit(f"found a {small['model_type']} model, expected a llama one")
    least = {"hidden": "hidden_size", "intermediate": "intermediate_size"}
    least["layers"] = "num_hidden_layers"
    for name, field in least.items():
        if getattr(sizes, name) < small[field]:
            raise SystemExit(f"--{name}: found {getattr(sizes, name)}, at least {small[field]}")
    if sizes.hidden % (heads * sizes.groups):
        raise SystemExit(f"--hidden: found {sizes.hidden}, expected a multiple of the heads")
    return {
        **small,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads * sizes.groups,
        "num_key_value_heads": small["num_key_value_heads"] * sizes.groups,
        "head_dim": small.get("head_dim") or small["hidden_size"] // heads,
        "rms_norm_eps": small["rms_norm_eps"] * small["hidden_size"] / sizes.hidden,
        "tie_word_embeddings": small.get("tie_word_embeddings", False),
    }


def wide_weights(
    small: Mapping[str, torch.Tensor], config: Mapping[str, Any], dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights of the large model; weights of the small one where it has such a layer."""
    random = torch.Generator().manual_seed(seed)
    hidden, head = config["hidden_size"], config["head_dim"]
    narrow = small["model.norm.weight"].shape[0]
    scale = math.sqrt(narrow / hidden)

    def placed(name: str, rows: int, columns: int, *, zero: bool) -> tuple[str, torch.Tensor]:
        """A matrix; `zero` where it writes to the residual stream."""
        matrix = torch.zeros(rows, columns)
        if not zero:
            matrix.normal_(0, SPREAD, generator=random)
        if name in small:
            part = small[name].float()
            matrix[: part.shape[0], : part.shape[1]] = part
        return name, matrix.to(dtype)

    def norm(name: str) -> tuple[str, torch.Tensor]:
        weight = torch.ones(hidden)
        if name in small:
            weight[:narrow] = small[name].float() * scale
        return name, weight.to(dtype)

    yield placed("model.embed_tokens.weight", config["vocab_size"], hidden, zero=True)
    if "lm_head.weight" in small:
        yield placed("lm_head.weight", config["vocab_size"], hidden, zero=False)
    yield norm("model.norm.weight")
    queries, keys = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    inner = config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield norm(f"{prefix}.input_layernorm.weight")
        yield norm(f"{prefix}.post_attention_layernorm.weight")
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield placed(f"{prefix}.self_attn.{name}_proj.weight", rows, hidden, zero=False)
        yield placed(f"{prefix}.self_attn.o_proj.weight", hidden, queries, zero=True)
        for name in ("gate", "up"):
            yield placed(f"{prefix}.mlp.{name}_proj.weight", inner, hidden, zero=False)
        yield placed(f"{prefix}.mlp.down_proj.weight", hidden, inner, zero=True)


def write_wide(small: Path, out: Path, sizes: argparse.Namespace) -> int:
    """Write the large model's folder; returns its number of parameters."""
    config = wide_config(json.loads((small / "config.json").read_text()), sizes)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(small.glob("*.safetensors")):
        weights |= load_file(file)
    out.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, sizes.dtype)
    config.pop("torch_dtype", None)
    config["dtype"] = sizes.dtype
    made = dict(wide_weights(weights, config, dtype, sizes.seed))
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for pattern in TOKENIZER_FILES:
        for file in small.glob(pattern):
            shutil.copy(file, out / file.name)
    return sum(weight.numel() for weight in made.values())


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("small", type=Path, help="folder of the small model, safetensors")
    made.add_argument("out", type=Path, help="folder to write")
    made.add_argument("--hidden", type=int, required=True, help="width of the residual stream")
    made.add_argument("--intermediate", type=int, required=True, help="width of the MLPs")
    made.add_argument("--layers", type=int, required=True)
    made.add_argument("--groups", type=int, default=1, help="so many times the attention heads")
    made.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    made.add_argument("--seed", type=int, default=1)
    return made


if __name__ == "__main__":
    given = parser().parse_args()
    print(
        f"{write_wide(given.small, given.out, given) / 1e9:.2f} billion parameters in {given.out}"
    )
