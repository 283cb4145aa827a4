# SPDX-License-Identifier: Apache-2.0
"""Blockwise heads in the engine: identity, chains and trees, and no extra target pass."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import ALWAYS_DRAFT, run, sampling_params, tokens
from homogeneity import same_distribution_p_value
from sampling_distributions import MAX_TOKENS, NUM_SAMPLES, NUM_TOKENS, SAME, Chances, first_tokens
from scenarios import PROMPTS, SCENARIOS, Scenario
from test_greedy_identity import runner_of
from tiny_model import VOCAB_SIZE

from vllm_spec_ext.proposers.blockwise.heads import BlockwiseHeads, HeadsConfig
from vllm_spec_ext.training.blockwise.checkpoint import save_heads
from vllm_spec_ext.training.blockwise.evaluate import HeadFigures


def save_random_heads(
    folder: Path,
    draft_vocab: list[int] | None = None,
    copy_match: int = 0,
    copy_trust: float = 3.0,
) -> Path:
    """Untrained heads: they repeat the target's own next token, copy, or guess wrongly."""
    config = HeadsConfig.model_validate(
        {
            "target": "tiny",
            "hidden_size": 128,
            "vocab_size": VOCAB_SIZE,
            "num_heads": 3,
            "head_width": 16,
            "draft_vocab_size": len(draft_vocab) if draft_vocab else None,
            "condition_on_next": copy_match > 0,
            "copy_match": copy_match,
        }
    )
    module = BlockwiseHeads(config)
    if draft_vocab:
        module.draft_vocab = torch.tensor(draft_vocab, dtype=torch.int32)
    torch.manual_seed(3)
    torch.nn.init.normal_(module.w_out, std=0.3)
    if copy_match:
        module.copy_trust.data[1:] = copy_trust
    accuracy = [dict.fromkeys(("top1", "top2", "top3", "top5"), 0.0)] * 3
    save_heads(folder, config, module, "fp32", HeadFigures(1, 1, 1.0, accuracy, 1.0, 1.0, 8, 1.0))
    return folder


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_heads(tmp_path_factory.mktemp("heads") / "heads")


@pytest.fixture(scope="module")
def copying_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_heads(tmp_path_factory.mktemp("heads") / "copying", copy_match=4)


@pytest.mark.parametrize("kind", ["heads", "copying_heads"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["mixed_lengths", "penalties", "logprobs", "max_model_len"])
def test_same_tokens(
    name: str, tree: bool, kind: str, make_engine: Any, request: pytest.FixtureRequest
) -> None:
    expected = tokens(run(make_engine(), SCENARIOS[name]))
    config = {
        "method": "blockwise",
        "model": str(request.getfixturevalue(kind)),
        "tree": tree,
        "num_speculative_tokens": 8 if tree else 3,
        "adaptive_length": False,
    }
    engine = make_engine(speculative_config=config)
    assert tokens(run(engine, SCENARIOS[name])) == expected


@pytest.mark.v1_runner
def test_no_extra_target_pass(
    heads: Path, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scoring one block and proposing the next share a forward pass: blocks + 1 in all."""
    config = {"method": "blockwise", "model": str(heads), "num_speculative_tokens": 3}
    config["adaptive_length"] = False
    engine = make_engine(speculative_config=config)
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    forward, passes = runner._model_forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(runner, "_model_forward", counted)
    core = engine.llm_engine
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    core.add_request("blocks", PROMPTS[0], params)
    blocks = 0
    while core.has_unfinished_requests():
        blocks += sum(bool(out.outputs[0].token_ids) for out in core.step())
    # The first block comes out of the prefill's own pass, so passes = remaining blocks + 1.
    assert len(passes) == blocks


def test_heads_of_another_model_are_refused(heads: Path, make_engine: Any, tmp_path: Path) -> None:
    import json
    import shutil

    other = tmp_path / "other"
    shutil.copytree(heads, other)
    config = json.loads((other / "config.json").read_text())
    config["hidden_size"] = 64
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="hidden"):
        make_engine(speculative_config={"method": "blockwise", "model": str(other)})
    assert run(make_engine(), Scenario([{"max_tokens": 2}], PROMPTS[:1]))


@pytest.mark.parametrize("distribution", ["temperature_1", "top_p"])
def test_sampled_output_has_the_targets_distribution(
    distribution: str, make_engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Chains of best tokens, drawn chains, and trees, of heads that draft what is allowed."""
    common = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    plain = make_engine(**common)
    chances = Chances(plain)
    given = chances.params(distribution)
    folder = save_random_heads(
        tmp_path_factory.mktemp("distribution") / distribution, given["allowed_token_ids"]
    )

    def sample(engine: Any, length: int) -> list[Hashable]:
        params = sampling_params({**given, "max_tokens": length})
        return first_tokens(engine, [params] * NUM_SAMPLES)

    expected = sample(plain, NUM_TOKENS)
    for options in ({}, {"draw": True}, {"tree": True, "candidates": 2}):
        size = 6 if "tree" in options else 3
        config = {"method": "blockwise", "model": str(folder), "num_speculative_tokens": size}
        engine = make_engine(**common, speculative_config={**config, **ALWAYS_DRAFT, **options})
        drafter = runner_of(engine).drafter
        accepted: list[int] = []
        observe = drafter._proposer.observe

        def watched(outcomes: Any, observe: Any = observe, accepted: list[int] = accepted) -> None:
            accepted += [outcome.num_accepted for outcome in outcomes]
            observe(outcomes)

        drafter._proposer.observe = watched
        found = sample(engine, MAX_TOKENS)
        assert sum(accepted) > 0.05 * len(accepted) > 0
        assert same_distribution_p_value(expected, found) > SAME, options


def test_heads_as_the_drafter_of_auto(
    heads: Path, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = SCENARIOS["mixed_lengths"]
    expected = tokens(run(make_engine(), scenario))
    drafter = {"method": "blockwise", "model": str(heads)}
    auto = {"method": "auto", "drafter": drafter, "num_speculative_tokens": 12, **ALWAYS_DRAFT}
    engine = make_engine(speculative_config=auto)
    proposer = runner_of(engine).drafter._proposer
    calls = 0
    propose = proposer._drafter.propose

    def counted(step: Any) -> Any:
        nonlocal calls
        calls += 1
        return propose(step)

    monkeypatch.setattr(proposer._drafter, "propose", counted)
    for _ in range(2):
        assert tokens(run(engine, scenario)) == expected
    assert calls > 50
