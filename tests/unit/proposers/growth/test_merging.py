# SPDX-License-Identifier: Apache-2.0
"""Chosen trees of several models in one trie, with credit to all who drafted a node."""

import numpy as np
import pytest
from fake_model import FakeModel, engine, random_next_logits, request, step

from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers.base import Draft, StepOutcome
from vllm_spec_ext.proposers.draft_tree import parents_of
from vllm_spec_ext.proposers.growth.grown_tree import GrownTree, Wish
from vllm_spec_ext.proposers.growth.learning import Learning
from vllm_spec_ext.proposers.growth.merging import MergedTree, merge_chosen
from vllm_spec_ext.proposers.token_tree import TokenTree

VOCAB = 6


def grown(*paths: tuple[int, ...], probs: dict[int, float] | None = None) -> GrownTree:
    """A tree of these paths; each token has a probability of its own."""
    tree = GrownTree(Wish(0, 100))
    index: dict[tuple[int, ...], int] = {(): -1}
    for path in paths:
        for size in range(1, len(path) + 1):
            prefix = path[:size]
            if prefix not in index:
                log_prob = float(np.log((probs or {}).get(prefix[-1], 0.5)))
                (index[prefix],) = tree.choose(index[prefix[:-1]], [prefix[-1]], [log_prob])
    return tree


def merged(*trees: GrownTree, room: int = 100) -> MergedTree:
    return merge_chosen(
        [(m, tree, [float(np.exp(p)) for p in tree.log_probs]) for m, tree in enumerate(trees)],
        room,
    )


def paths_of(tree: MergedTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_the_same_path_is_one_node_of_both_models() -> None:
    tree = merged(grown((1, 2, 3), (1, 4)), grown((1, 2, 5), (6,)))
    owners = {path: set(own) for path, own in zip(paths_of(tree), tree.promises, strict=True)}
    assert owners == {
        (1,): {0, 1},
        (1, 2): {0, 1},
        (1, 2, 3): {0},
        (1, 4): {0},
        (1, 2, 5): {1},
        (6,): {1},
    }
    draft = tree.draft(["big", "small"])
    assert draft.sources is not None
    assert dict(zip(paths_of(tree), draft.sources, strict=True))[1, 2] == ("big", "small")


def test_the_likeliest_path_of_all_models_comes_first() -> None:
    first = grown((1, 2), (3,), probs={1: 0.4, 2: 0.5, 3: 0.1})
    second = grown((4, 5), probs={4: 0.6, 5: 0.9})
    tree = merged(first, second)
    assert paths_of(tree) == [(4,), (4, 5), (1,), (1, 2), (3,)]
    assert tree.probs == pytest.approx([0.6, 0.54, 0.4, 0.2, 0.1])
    assert paths_of(merged(first, second, room=3)) == [(4,), (4, 5), (1,)]


def test_a_child_is_never_likelier_than_its_parent() -> None:
    tree = grown((1, 2))
    found = merge_chosen([(0, tree, [0.3, 0.9])], 100)
    assert found.probs == [0.3, 0.3]


def test_credit_goes_to_whom_the_path_is_owed() -> None:
    learning = Learning(3)
    for _ in range(200):
        # The second model drafts what the first does, the third finds two tokens more.
        tree = merged(grown((1, 2)), grown((1, 2)), grown((1, 2, 3, 4)))
        learning.drafted("a", tree)
        nodes = tuple(paths_of(tree).index(p) for p in [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)])
        learning.observe(StepOutcome("a", len(tree), 4, nodes))
    first, second, third = learning.models
    assert first.novelty == 1.0
    assert second.novelty < 0.1
    assert third.novelty == pytest.approx(0.5, abs=0.05)
    assert first.levels.rate(1) > 0.95  # two of two
    assert third.levels.rate(3) > 0.95
    assert first.levels.rate(2) == pytest.approx(0.75)  # it never tried a third


def test_a_wrong_model_is_not_trusted() -> None:
    learning = Learning(2)
    for _ in range(200):
        tree = merged(grown((1, 2)), grown((3, 4)))
        learning.drafted("a", tree)
        nodes = tuple(paths_of(tree).index(path) for path in [(1,), (1, 2)])
        learning.observe(StepOutcome("a", len(tree), 2, nodes))
    right, wrong = learning.models
    assert right.levels.rate(0) > 0.95
    assert wrong.levels.rate(0) < 0.1
    promise = np.array([0.5], np.float32)
    assert right.nodes.acceptance(promise)[0] > 0.9
    assert wrong.nodes.acceptance(promise)[0] < 0.1


def test_draws_are_credited_by_their_place() -> None:
    models = [FakeModel(random_next_logits(seed, VOCAB), VOCAB, name=f"m{seed}") for seed in (0, 1)]
    options = parse_options(
        TokenTree.info.options, {"models": ["a", "b"], "expansion": [2, 1]}, "token_tree"
    )
    proposer = TokenTree(options)
    proposer.start(engine(*models))
    for i in range(100):
        asked = request(name=str(i), temperature=1.0)
        (draft,) = proposer.propose(step(asked))
        assert parents_of(draft) == [-1, 0, -1, 2, -1, 4, -1, 6]
        # The second draw of the first model is right, and what it drew behind it.
        proposer.observe([StepOutcome(str(i), len(draft), 2, (2, 3))])
    first, second = proposer._learning.models
    assert first.ranks.rates(2)[1] > 0.45  # also the place of a single draw below: 1 of 2
    assert first.drawn_levels.rate(0) > 0.95
    assert second.drawn_levels.rate(0) < 0.1
    assert second.novelty == 1.0  # it accepted nothing, so it is not known
    assert isinstance(draft, Draft)


def test_outcomes_that_never_come_are_forgotten() -> None:
    learning = Learning(1)
    learning.drafted("a", merged(grown((1,))))
    learning.forget("a")
    learning.observe(StepOutcome("a", 1, 1))
    assert learning.models[0].levels.rate(0) == pytest.approx(0.7)
