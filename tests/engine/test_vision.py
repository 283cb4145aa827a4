# SPDX-License-Identifier: Apache-2.0
"""A target that sees pictures: drafted requests say what plain decoding says, with and without one.

Models with multi-dimensional rotary positions (Qwen2-VL and its like) need torchvision, which CPU
installations lack, so the way that trees take on them is shown on this one.
"""

import logging
from typing import Any

import numpy as np
import pytest
from generation import ALWAYS_DRAFT, sampling_params, tokens
from test_greedy_identity import runner_of
from tiny_vision_model import IMAGE_SIZE, build_tiny_vision_model

from vllm_spec_ext.engine.starting import kv_setup
from vllm_spec_ext.engine.trees.attention import unsupported_reason

NGRAMS = {"method": "adaptive_ngram", "overlay": "both", "min_confidence": 0.0, **ALWAYS_DRAFT}
METHODS: dict[str, dict[str, Any]] = {
    "oracle": {"method": "oracle", "num_speculative_tokens": 8},
    "oracle_tree": {"method": "oracle", "num_speculative_tokens": 12, "branches": 4},
    "input_copy": {"method": "input_copy", "num_speculative_tokens": 8},
    "adaptive_ngram": {**NGRAMS, "num_speculative_tokens": 12},
}
LENGTHS = (40, 25, 60, 33, 12, 48)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Engine arguments."""
    folder = build_tiny_vision_model(tmp_path_factory.mktemp("seeing"))
    return {"model": str(folder), "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    """One picture, another one, the first again, two at once, and none."""
    from PIL import Image

    pictures = [
        Image.fromarray(
            np.random.default_rng(seed).integers(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
        )
        for seed in (1, 2)
    ]
    one = "The quick <image> brown fox"
    return [
        {"prompt": one, "multi_modal_data": {"image": pictures[0]}},
        {"prompt": one, "multi_modal_data": {"image": pictures[1]}},
        {"prompt": one + " jumps", "multi_modal_data": {"image": pictures[0]}},
        {"prompt": "<image> and <image>", "multi_modal_data": {"image": pictures}},
        {"prompt": "The quick brown fox"},
        {"prompt": "Repeat: one two three one two three"},
    ]


def answers(engine: Any, prompts: list[Any], extras: list[Any] | None = None) -> list[list[int]]:
    params = [
        sampling_params({"max_tokens": length, "ignore_eos": True}, extra)
        for length, extra in zip(LENGTHS, extras or [None] * len(prompts), strict=True)
    ]
    return [out[0] for out in tokens(engine.generate(prompts, params, use_tqdm=False))]


@pytest.fixture(scope="module")
def expected(make_engine: Any, seeing: dict[str, Any], prompts: list[Any]) -> list[list[int]]:
    found = answers(make_engine(**seeing), prompts)
    assert found[0][:12] != found[1][:12]  # the pictures are seen
    return found


def truths(expected: list[list[int]]) -> list[dict[str, Any]]:
    return [{"truth": said} for said in expected]


@pytest.mark.parametrize("name", METHODS)
def test_same_tokens(
    name: str,
    make_engine: Any,
    seeing: dict[str, Any],
    prompts: list[Any],
    expected: list[list[int]],
) -> None:
    engine = make_engine(**seeing, speculative_config=METHODS[name])
    knows = name.startswith("oracle")
    for _ in range(2):  # the second time with what was learned, and with a filled prefix cache
        assert answers(engine, prompts, truths(expected) if knows else None) == expected
    if knows:
        outcomes = runner_of(engine).drafter._proposer.outcomes
        assert sum(outcome.num_accepted for outcome in outcomes) > 100


@pytest.mark.parametrize("method", ["fixed", "input_copy"])
def test_drafted_placeholders_of_pictures_change_nothing(
    method: str,
    make_engine: Any,
    seeing: dict[str, Any],
    prompts: list[Any],
    expected: list[list[int]],
) -> None:
    """As when a prompt is copied across the place of a picture."""
    config = {"method": method, "num_speculative_tokens": 8}
    engine = make_engine(**seeing, speculative_config=config)
    tokenizer = engine.get_tokenizer()
    names = ["<fake_token_around_image>", "<global-img>", "<image>", "<image>"]
    place = tokenizer.convert_tokens_to_ids(names)
    extras: list[dict[str, Any]] = []
    for said in expected:
        if method == "fixed":
            extras.append({"tokens": [*place, said[5]]})
        else:
            extras.append({"source_token_ids": [*said[:4], *place, *said[4:9], *place]})
    assert answers(engine, prompts, extras) == expected


def test_trees_fall_back_to_their_first_path_where_positions_are_not_one_number(
    make_engine: Any,
    seeing: dict[str, Any],
    prompts: list[Any],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def with_rotary_positions(runner: Any) -> str | None:
        with monkeypatch.context() as patch:
            patch.setattr(type(runner.model_config), "uses_mrope", True)
            return unsupported_reason(runner)

    monkeypatch.setattr(kv_setup, "unsupported_reason", with_rotary_positions)
    logger = logging.getLogger("vllm.spec_ext")
    logger.addHandler(caplog.handler)
    try:
        tree = {**METHODS["oracle_tree"], "wrong": 0.1}
        engine = make_engine(**seeing, speculative_config=tree)
    finally:
        logger.removeHandler(caplog.handler)
    assert "multi-dimensional rotary positions" in caplog.text
    runner = runner_of(engine)
    assert runner.tree_attention is None
    assert answers(engine, prompts, truths(expected)) == expected
    # The oracle's first path is a wrong one.
    outcomes = runner.drafter._proposer.outcomes
    assert outcomes
    assert sum(outcome.num_accepted for outcome in outcomes) == 0
