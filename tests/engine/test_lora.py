# SPDX-License-Identifier: Apache-2.0
"""A target with LoRA adapters: drafted requests say what plain LoRA serving says."""

from pathlib import Path
from typing import Any

import pytest
from generation import ALWAYS_DRAFT, sampling_params, tokens
from save_dflash import save_dflash
from save_eagle3 import save_eagle3
from scenarios import PROMPTS
from test_blockwise_engine import save_random_heads
from test_greedy_identity import runner_of
from tiny_adapter import RANK, build_tiny_adapter

LENGTHS = [{"max_tokens": n, "ignore_eos": True} for n in (40, 23, 60, 8)]
NGRAMS = {"method": "adaptive_ngram", "overlay": "both", "min_confidence": 0.0, **ALWAYS_DRAFT}
METHODS: dict[str, dict[str, Any]] = {
    "oracle": {"method": "oracle", "num_speculative_tokens": 8},
    "oracle_tree": {"method": "oracle", "num_speculative_tokens": 12, "branches": 4},
    "input_copy": {"method": "input_copy", "num_speculative_tokens": 8},
    "adaptive_ngram": {**NGRAMS, "num_speculative_tokens": 12},
    "blockwise": {"method": "blockwise", "num_speculative_tokens": 3},
    "blockwise_tree": {"method": "blockwise", "num_speculative_tokens": 8, "tree": True},
    "small_model": {"method": "small_model", "num_speculative_tokens": 4},
    "nar": {"method": "nar", "adaptive_length": False},
}


@pytest.fixture(scope="module")
def lora() -> dict[str, Any]:
    """Engine arguments."""
    return {
        "enable_lora": True,
        "max_lora_rank": RANK,
        "max_loras": 2,
        "max_num_batched_tokens": 160,
    }


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two of them."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("adapters")
    names = enumerate(("first", "second"), start=1)
    return [
        LoRARequest(name, i, str(build_tiny_adapter(folder / name, seed=i))) for i, name in names
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, str]:
    """By method, drafters that read the target's embeddings."""
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "blockwise": str(save_random_heads(folder / "heads", copy_match=4)),
        "small_model": save_eagle3(tiny_model, folder / "eagle3"),
        "nar": save_dflash(tiny_model, folder / "nar"),
    }


def answers(
    engine: Any, adapters: list[Any], truths: list[list[int]] | None = None
) -> list[list[int]]:
    """Every prompt with every adapter, all in one batch, and then without any.

    Not in one batch: there vLLM 0.32 on CPU answers a request without an adapter by another's.
    """
    prompts = [prompt for prompt in PROMPTS[:3] for _ in adapters]
    params = []
    for i in range(2 * len(prompts)):
        extra = {"truth": truths[i]} if truths else None
        params.append(sampling_params(LENGTHS[i % len(LENGTHS)], extra))
    half = len(prompts)
    found = engine.generate(prompts, params[:half], lora_request=adapters * 3, use_tqdm=False)
    found += engine.generate(prompts, params[half:], use_tqdm=False)
    return [out[0] for out in tokens(found)]


@pytest.fixture(scope="module")
def expected(make_engine: Any, lora: dict[str, Any], adapters: list[Any]) -> list[list[int]]:
    found = answers(make_engine(**lora), adapters)
    first_words = {tuple(said[:8]) for said in (found[0], found[1], found[len(found) // 2])}
    assert len(first_words) == 3  # the adapters do something
    return found


@pytest.mark.parametrize("name", METHODS)
def test_same_tokens_as_plain_lora_serving(
    name: str,
    make_engine: Any,
    lora: dict[str, Any],
    adapters: list[Any],
    checkpoints: dict[str, str],
    expected: list[list[int]],
) -> None:
    config = dict(METHODS[name])
    if config["method"] in checkpoints:
        config["model"] = checkpoints[config["method"]]
    engine = make_engine(**lora, speculative_config=config)
    truths = expected if config["method"] == "oracle" else None
    for _ in range(2):  # the second time with what was learned, and with a filled prefix cache
        assert answers(engine, adapters, truths) == expected
    if truths:
        outcomes = runner_of(engine).drafter._proposer.outcomes
        assert sum(outcome.num_accepted for outcome in outcomes) > 100
