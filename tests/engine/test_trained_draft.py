# SPDX-License-Identifier: Apache-2.0
"""A folder that ``vllm-spec train draft`` made runs in vLLM's own ``draft_model``, and in ours."""

from pathlib import Path
from typing import Any

import pytest
from generation import run, tokens
from scenarios import PROMPTS, SCENARIOS

from vllm_spec_ext.training.draft.schema import DraftTraining
from vllm_spec_ext.training.draft.trainer import train_draft

DRAFTS: dict[str, dict[str, Any]] = {
    "depth": {"layers": 2},
    "vocabulary": {"layers": 2, "vocab": 400},
}
OWN = {"method": "draft_model", "num_speculative_tokens": 3}
METHODS: dict[str, dict[str, Any]] = {
    "depth in vLLM": {**OWN, "model": "depth"},
    "vocabulary in vLLM": {**OWN, "model": "vocabulary", "use_heterogeneous_vocab": True},
    "depth": {"method": "small_model", "model": "depth", "adaptive_length": False},
}


@pytest.fixture(scope="module")
def drafts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of drafts that were trained on the tiny target's answers."""
    folder = tmp_path_factory.mktemp("drafts")
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{prompt} {i}\n" for i in range(6) for prompt in PROMPTS))

    def trained(name: str, **changes: Any) -> str:
        config = DraftTraining(
            model=str(tiny_model),
            prompts=[prompts],
            chat="never",
            data=folder / "data",
            out=folder / name,
            generator="transformers",
            max_new_tokens=48,
            max_steps=150,
            batch_size=8,
            learning_rate=2e-3,
            device="cpu",
            **changes,
        )
        train_draft(config, lambda line: None)
        return str(folder / name)

    return {name: trained(name, **changes) for name, changes in DRAFTS.items()}


def counts(engine: Any) -> tuple[int, int]:
    """Drafted tokens so far, and accepted ones."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    names = ("draft_tokens", "accepted_tokens")
    drafted, accepted = (int(values[f"vllm:spec_decode_num_{name}"]) for name in names)
    return drafted, accepted


@pytest.mark.parametrize("name", METHODS)
def test_same_tokens_and_some_of_them_drafted(
    name: str, drafts: dict[str, str], make_engine: Any, expected: dict[str, Any]
) -> None:
    given = METHODS[name]
    engine = make_engine(speculative_config={**given, "model": drafts[given["model"]]})
    drafted, accepted = counts(engine)
    for scenario in ("mixed_lengths", "prefix_reused"):
        assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario]
    now_drafted, now_accepted = counts(engine)
    assert now_drafted - drafted > 200
    # A guess at random is right once in 400 times. The tiny target's text is hard to foresee.
    assert now_accepted - accepted > 0.01 * (now_drafted - drafted)
