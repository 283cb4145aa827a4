# SPDX-License-Identifier: Apache-2.0
"""`small_model` and `token_tree` on a real engine: same text, same distribution, right drafts."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generation import run, sampling_params, tokens
from homogeneity import same_distribution_p_value
from sampling_distributions import DIFFERENT, SAME, samples_of
from scenarios import SCENARIOS
from test_greedy_identity import runner_of
from test_models_oracle import FREE, save_draft

from vllm_spec_ext.proposers.base import StepOutcome
from vllm_spec_ext.proposers.draft_tree import agreeing_path
from vllm_spec_ext.proposers.growth import levels, merging, tree_drafting
from vllm_spec_ext.proposers.growth.grown_tree import GrownTree
from vllm_spec_ext.proposers.growth.learning import Learning
from vllm_spec_ext.proposers.growth.merging import MergedTree

STEADY = {"adaptive_length": False}

METHODS: dict[str, dict[str, Any]] = {
    "chain": {"method": "small_model", "model": "self", "num_speculative_tokens": 4},
    "expansion": {
        "method": "token_tree",
        "models": ["self"],
        "expansion": [2, 2, 1],
        "num_speculative_tokens": 10,
    },
    "dynamic": {"method": "token_tree", "models": ["self"], "num_speculative_tokens": 8},
    "merged": {
        "method": "token_tree",
        "models": ["other", "self"],
        "expansion": [2, 1, 1],
        "num_speculative_tokens": 12,
    },
}


@pytest.fixture(scope="module")
def drafts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "self": str(tiny_model),
        "other": save_draft(tiny_model, folder / "other", num_hidden_layers=1),
    }


def with_folders(config: dict[str, Any], drafts: dict[str, str]) -> dict[str, Any]:
    config = dict(config)
    if "model" in config:
        config["model"] = drafts[config["model"]]
    else:
        config["models"] = [drafts[name] for name in config["models"]]
    return {**config, **STEADY}


@pytest.fixture(scope="module")
def engines(make_engine: Any, drafts: dict[str, str]) -> Callable[[str], Any]:
    def make(name: str) -> Any:
        return make_engine(speculative_config=with_folders(METHODS[name], drafts))

    return make


Outcomes = list[tuple[StepOutcome, MergedTree, tuple[int, ...]]]


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Outcomes:
    """What became of each draft: with the tree, and what the last model thinks likeliest."""
    seen: Outcomes = []
    likeliest: dict[int, tuple[int, ...]] = {}  # by identity of the tree
    observe = Learning.observe

    def watched(self: Learning, outcome: StepOutcome) -> None:
        tree = self._waiting.get(outcome.request_id)
        if tree is not None:
            seen.append((outcome, tree, likeliest[id(tree)]))
        observe(self, outcome)

    def remembering(merge: Callable[..., MergedTree]) -> Callable[..., MergedTree]:
        def merged(trees: Any, *more: Any) -> MergedTree:
            tree = merge(trees, *more)
            likeliest[id(tree)] = first_path(trees[-1][1])
            return tree

        return merged

    monkeypatch.setattr(Learning, "observe", watched)
    for name in ("merge_chosen", "join_drawn"):
        monkeypatch.setattr(tree_drafting, name, remembering(getattr(tree_drafting, name)))
    return seen


def first_path(tree: GrownTree) -> tuple[int, ...]:
    """Tokens of the path that follows each node's first child."""
    path: list[int] = []
    above = -1
    for node in range(len(tree)):
        if tree.parents[node] == above and tree.ranks[node] == 0:
            path.append(tree.tokens[node])
            above = node
    return tuple(path)


def likeliest_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings of chosen trees the other way round, so accepted nodes lie in scratch blocks."""
    original = merging._depth_first

    def turned_round(tree: MergedTree, room: int) -> MergedTree:
        tree = original(tree, room)
        order: list[int] = []
        stack = [-1]
        while stack:
            node = stack.pop()
            if node >= 0:
                order.append(node)
            stack += [n for n in range(len(tree)) if tree.parents[n] == node]
        place = {-1: -1, **{node: i for i, node in enumerate(order)}}
        return replace(
            tree,
            tokens=[tree.tokens[node] for node in order],
            parents=[place[tree.parents[node]] for node in order],
            probs=[tree.probs[node] for node in order],
            promises=[tree.promises[node] for node in order],
            barren=[tree.barren[node] for node in order],
        )

    monkeypatch.setattr(merging, "_depth_first", turned_round)


@pytest.mark.parametrize(
    ("name", "backwards"),
    [*((name, False) for name in METHODS), *((name, True) for name in METHODS if name != "chain")],
)
def test_the_target_accepts_all_of_itself(
    name: str,
    backwards: bool,
    engines: Any,
    expected: dict[str, Any],
    outcomes: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engines(name)
    if backwards:
        likeliest_last(monkeypatch)
    for scenario in FREE:
        outcomes.clear()
        assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario], scenario
        num_right = num_scratch = 0
        for outcome, tree, likeliest in outcomes:
            size = outcome.num_drafted
            right = agreeing_path(tree.tokens[:size], tree.parents[:size], likeliest)
            assert tuple(outcome.accepted)[: len(right)] == right, scenario
            num_right += len(right)
            num_scratch += right != tuple(range(len(right)))
        assert num_right >= 15, scenario
        # With a temperature, even if one token is left to choose, trees are drawn in their order.
        if scenario != "several_samples":
            assert num_scratch or not backwards, scenario


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in FREE])
def test_same_tokens_where_others_choose_too(
    scenario: str, name: str, engines: Any, expected: dict[str, Any]
) -> None:
    assert tokens(run(engines(name), SCENARIOS[scenario])) == expected[scenario]


def test_what_does_not_pay_runs_no_pass(
    make_engine: Any, drafts: dict[str, str], expected: dict[str, Any]
) -> None:
    """A model as slow as the target; first the engine measures, and drafts to see its cost."""
    config = with_folders(METHODS["chain"], drafts) | {"adaptive_length": True}
    engine = make_engine(speculative_config=config)
    scenario = SCENARIOS["batch_of_one"]
    runner = runner_of(engine)
    (model,) = runner.drafter.models.models
    model.forward_seconds = lambda num_rows: 1000.0
    long = sampling_params({"max_tokens": 120, "ignore_eos": True})
    engine.generate(scenario.prompts, long, use_tqdm=False)
    before = model.counts.forwards
    assert tokens(run(engine, scenario)) == expected["batch_of_one"]
    assert model.counts.forwards == before


# Few outcomes, all of them likely; drafts are filtered alike, so that they hit these often.
DRAWN = {"temperature": 0.9, "top_k": 4, "ignore_eos": True}
SAMPLED: dict[str, dict[str, Any]] = {
    "chain": {"method": "small_model", "model": "near", "num_speculative_tokens": 3},
    "tree": {
        "method": "token_tree",
        "models": ["near"],
        "expansion": [3, 1, 1],
        "num_speculative_tokens": 9,
    },
    "dynamic": {"method": "token_tree", "models": ["near"], "num_speculative_tokens": 6},
    "merged": {
        "method": "token_tree",
        "models": ["near", "nearby"],
        "expansion": [2, 1],
        "num_speculative_tokens": 8,
    },
}


def save_noisy(target: Path, folder: Path, noise: float, seed: int) -> str:
    """The target with noise on its vocabulary projection: a distribution of its own."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target).float()
    torch.manual_seed(seed)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight.add_(torch.randn_like(weight), alpha=noise)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def sample(
    make_engine: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Hashable]]:
    """Samples of the first tokens by an engine that drafts so, or "plain"."""
    folder = tmp_path_factory.mktemp("near")
    drafts = {
        "near": save_noisy(tiny_model, folder / "near", 0.05, 1),
        "nearby": save_noisy(tiny_model, folder / "nearby", 0.05, 2),
    }

    def draw(name: str) -> list[Hashable]:
        config = None if name == "plain" else with_folders(SAMPLED[name], drafts)
        return samples_of(make_engine, DRAWN, config)

    return draw


@pytest.fixture(scope="module")
def plain_sample(sample: Any) -> list[Hashable]:
    return sample("plain")


@pytest.mark.parametrize("name", SAMPLED)
def test_drawn_drafts_keep_the_targets_distribution(
    name: str, sample: Any, plain_sample: list[Hashable], outcomes: Any
) -> None:
    found = sample(name)
    accepted = sum(outcome.num_accepted for outcome, *_ in outcomes)
    drafted = sum(outcome.num_drafted for outcome, *_ in outcomes)
    assert all(tree.rows is not None for _, tree, _ in outcomes)  # drawn, not chosen
    assert accepted >= 2000
    assert accepted < 0.9 * drafted  # the draft's distribution is another one
    assert same_distribution_p_value(plain_sample, found) > SAME


def test_chosen_children_with_the_models_probabilities_are_found_out(
    sample: Any, plain_sample: list[Hashable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other known mistakes: tests/unit/proposers/growth/test_drawn_trees_are_exact.py."""

    def best(probs: Any, numbers: Any) -> Any:
        return probs.topk(numbers.shape[1], dim=-1).indices.int().numpy()

    monkeypatch.setattr(levels, "draw", best)
    assert same_distribution_p_value(plain_sample, sample("tree")) < DIFFERENT


def test_a_seeded_text_does_not_depend_on_drafts(engines: Any, plain: Any) -> None:
    params = [
        sampling_params({"temperature": 1.0, "seed": seed, "max_tokens": 20}) for seed in range(6)
    ]
    texts = []
    for engine in (plain, engines("merged")):
        outputs = engine.generate(["The dog"] * len(params), params, use_tqdm=False)
        texts.append(tokens(outputs))
    assert texts[0] == texts[1]


def test_a_draft_model_as_the_drafter_of_auto(
    make_engine: Any, drafts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target itself, so what it drafts is accepted; by its own record a pass pays, too."""
    drafter = {"method": "small_model", "model": drafts["self"]}
    config = {"method": "auto", "drafter": drafter, "num_speculative_tokens": 8, **STEADY}
    engine = make_engine(speculative_config=config)
    told: list[StepOutcome] = []
    small_model = runner_of(engine).drafter._proposer._drafter
    observe = small_model.observe

    def watched(outcomes: list[StepOutcome]) -> None:
        told.extend(outcomes)
        observe(outcomes)

    monkeypatch.setattr(small_model, "observe", watched)
    expected = tokens(run(make_engine(), SCENARIOS["mixed_lengths"]))
    assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected
    assert sum(outcome.num_accepted for outcome in told) > 100
    # A tree of the target's likeliest tokens: its first path is right as far as it goes.
    assert all(outcome.num_accepted for outcome in told)
