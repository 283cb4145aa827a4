# SPDX-License-Identifier: Apache-2.0
"""Ranking draft models: against a simulation that walks through the answers step by step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.bench.draft_acceptance import check_ids
from vllm_spec_ext.bench.draft_plan import (
    PAIRS,
    Candidate,
    DraftModelFacts,
    Pair,
    best_chain,
    for_pair,
    parse_tree,
    rank,
    speed_up,
    tree_for_pair,
    tree_speed_up,
)
from vllm_spec_ext.bench.planner import StepTimes
from vllm_spec_ext.errors import SpecExtError


def facts(name: str, share: float, seed: int, forward_s: float = 0.01) -> DraftModelFacts:
    random = np.random.default_rng(seed)
    right = [random.random(n) < share for n in (40, 17, 1, 90)]
    ranks = tuple(np.where(each, 0, random.choice([-1, 1, 2, 3], len(each))) for each in right)
    return DraftModelFacts(name, 2, 1000, ranks, {1: forward_s, 8: forward_s * 2})


def simulated(
    models: list[DraftModelFacts], widths: list[int], verify: float, draft: float
) -> float:
    """Mean seconds a token, with a plain step as the unit; the slow and plain way."""
    each = []
    for answer in zip(*(model.ranks for model in models), strict=True):
        position, seconds = 0, 0.0
        while position < len(answer[0]):
            best = 0
            for ranks in answer:
                length = 0
                for width, found in zip(widths, ranks[position:].tolist(), strict=False):
                    if not 0 <= found < width:
                        break
                    length += 1
                best = max(best, length)
            seconds += verify + len(widths) * draft
            position += best + 1
        each.append(seconds / len(answer[0]))
    return sum(each) / len(each)


@pytest.mark.parametrize("chain", [1, 3, 8])
def test_speed_up_is_that_of_a_simulation(chain: int) -> None:
    one, two = facts("a", 0.6, 0), facts("b", 0.5, 1)
    for models in ([one], [one, two]):
        found = speed_up(Candidate(tuple(models)), chain, 1.3, 0.2)
        assert found == pytest.approx(1 / simulated(models, [1] * chain, 1.3, 0.2))


@pytest.mark.parametrize("tree", [(1,), (3, 1, 1), (2, 4), (1, 1, 3, 1, 1)])
def test_speed_up_of_a_tree_is_that_of_a_simulation(tree: tuple[int, ...]) -> None:
    one, two = facts("a", 0.4, 0), facts("b", 0.3, 1)
    for models in ([one], [one, two]):
        found = speed_up(Candidate(tuple(models)), tree, 1.3, 0.2)
        assert found == pytest.approx(1 / simulated(models, list(tree), 1.3, 0.2))


def test_a_tree_costs_its_nodes_and_a_pass_for_each_level() -> None:
    one, two = facts("a", 0.4, 0), facts("b", 0.3, 1)
    single, both = Candidate((one,)), Candidate((one, two))
    assert single.num_nodes((1, 1, 3, 1, 1)) == 11  # as SpecInfer counts
    assert both.num_nodes((4, 2)) == 24
    assert single.num_nodes(5) == 5
    times = StepTimes({1: {0: 0.1, 12: 0.22, 24: 0.34}})
    found = tree_speed_up(single, (4, 2), 1, times)
    assert found == pytest.approx(speed_up(single, (4, 2), 2.2, 0.1))
    assert tree_speed_up(both, (4, 2), 1, times) == pytest.approx(speed_up(both, (4, 2), 3.4, 0.2))
    assert single.tokens_per_step((4, 4)) > single.tokens_per_step((2, 1)) > 1
    assert tree_for_pair(single, (1, 1), Pair("x", 0.1)) == speed_up(single, 2, 1.0, 0.1)
    assert parse_tree("4, 1,1") == (4, 1, 1)
    for wrong in ("", "4,,1", "0,1", "9", "a", "-1"):
        with pytest.raises(SpecExtError, match="expected the children of each node"):
            parse_tree(wrong)


def test_perfect_and_useless_drafts() -> None:
    perfect = Candidate((facts("p", 2.0, 0),))
    useless = Candidate((facts("u", -1.0, 0),))
    assert perfect.coverage == 1.0
    assert perfect.per_position(3) == [1.0, 1.0, 1.0]
    assert speed_up(useless, 2, 1.0, 0.25) == pytest.approx(1 / 1.5)
    assert useless.tokens_per_step(4) == 1.0
    assert best_chain(useless, 8, lambda nodes: 1.0, 0.1).chain == 1
    assert best_chain(perfect, 8, lambda nodes: 1.0, 0.01).chain > 4


def test_ranked_by_speed_not_by_quality() -> None:
    good, fast = facts("good", 0.8, 0, forward_s=0.08), facts("fast", 0.6, 1, forward_s=0.002)
    times = StepTimes({1: {0: 0.1, 16: 0.1}, 8: {0: 0.1, 16: 0.5}})
    candidates = [Candidate((good,)), Candidate((fast,)), Candidate((good, fast))]
    ranked = rank(candidates, 1, 8, times)
    assert ranked[0].candidate.name == "fast"
    assert candidates[0].coverage > candidates[1].coverage
    assert [one.speed_up for one in ranked] == sorted((o.speed_up for o in ranked), reverse=True)
    # Where verifying is dear, chains are shorter; two models verify twice as many tokens.
    assert rank(candidates, 8, 8, times)[0].chain < ranked[0].chain
    both = next(one for one in ranked if one.candidate.name == "good+fast")
    assert both.candidate.coverage >= candidates[0].coverage
    expected = speed_up(candidates[2], both.chain, 1.0, 0.82)
    assert both.speed_up == pytest.approx(expected)


def test_pairs() -> None:
    one = Candidate((facts("a", 0.7, 0),))
    found = for_pair(one, Pair("x", 0.1), 8)
    assert found.speed_up == max(speed_up(one, k, 1.0, 0.1) for k in range(1, 9))
    assert Pair.parse("7B + 68M=0.03") == Pair("7B + 68M", 0.03)
    assert [for_pair(one, pair, 8).speed_up for pair in PAIRS[:2]] == sorted(
        (for_pair(one, pair, 8).speed_up for pair in PAIRS[:2]), reverse=True
    )
    for wrong in ("a", "=0.1", "a=0", "a=-1", "a=x", "a=nan", "a=inf"):
        with pytest.raises(SpecExtError, match="expected NAME=RATIO"):
            Pair.parse(wrong)


class Words:
    def __init__(self, vocab: dict[str, int]) -> None:
        self.vocab = vocab

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def test_other_tokenizers_are_refused() -> None:
    target = Words({"a": 0, "b": 1, "c": 2})
    check_ids(target, Words({"a": 0, "b": 1}), "draft")
    with pytest.raises(SpecExtError, match="2 of its 2 token ids"):
        check_ids(target, Words({"a": 1, "b": 0}), "draft")
    with pytest.raises(SpecExtError, match="1 of its 2 token ids"):
        check_ids(target, Words({"a": 0, "x": 1}), "draft")


def test_acceptance_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's own greedy text, as if it were the target's, is guessed wholly; other is not."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from vllm_spec_ext.bench import draft_acceptance
    from vllm_spec_ext.training import target as target_module

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.5, **shape)).eval()
    model.save_pretrained(tmp_path / "draft")
    words = Words({str(i): i for i in range(64)})
    monkeypatch.setattr(target_module, "load_tokenizer", lambda name: words)
    answers = []
    for prompt in ([5, 6, 7], [9]):
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        answers.append((prompt, ids[0, len(prompt) :].tolist()))
    answers.append((answers[0][0], [(t + 1) % 64 for t in answers[0][1]]))
    path = tmp_path / "answers.json"
    path.write_text(json.dumps({"target": "t", "answers": answers}))
    found = draft_acceptance.measure(str(tmp_path / "draft"), path, "float32")
    assert found["num_layers"] == 2
    assert found["num_parameters"] == sum(p.numel() for p in model.parameters())
    assert found["ranks"][:2] == [[0] * 12, [0] * 12]
    assert found["ranks"][2][0] != 0
