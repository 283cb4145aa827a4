# SPDX-License-Identifier: Apache-2.0
"""What sources promise too much or too little of is found out, by depth and by request."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import UNSALTED, RequestStep, StepContext, StepOutcome
from vllm_spec_ext.proposers.candidates.evidence import NUM_COLUMNS
from vllm_spec_ext.proposers.candidates.lookup import Candidates, Lookup
from vllm_spec_ext.proposers.candidates.path_trust import PathTrust
from vllm_spec_ext.proposers.candidates.tree_drafts import DraftCosts, TreeDrafts
from vllm_spec_ext.proposers.draft_tree import tree_problem
from vllm_spec_ext.proposers.payoff.branches import parents_among, paying_nodes
from vllm_spec_ext.proposers.suffix_tree import SuffixTree

LENGTH = 10
CHAIN = np.arange(-1, LENGTH - 1, dtype=np.int32)
PROMISED = np.cumprod(np.full(LENGTH, 0.9)).astype(np.float32)  # 5.86 tokens


TREE = Candidates(CHAIN, CHAIN, PROMISED, np.zeros((LENGTH, NUM_COLUMNS), np.int16), PROMISED)


def trusted(trust: PathTrust, name: str) -> NDArray[np.float32]:
    """What the promised paths are worth in this request."""
    return trust.best_part(name, TREE, 0.0, 0.0).paths


def drafts(
    trust: PathTrust,
    random: np.random.Generator,
    truth: Callable[[int], float],
    *,
    count: int,
    name: str = "r",
) -> tuple[float, float]:
    """Accepted tokens that were expected of chains, and found; each node is right by `truth`."""
    expected = found = 0.0
    for _ in range(count):
        accepted = np.zeros(LENGTH, np.bool_)
        for depth in range(LENGTH):
            if random.random() >= truth(depth):
                break
            accepted[depth] = True
        expected += float(trusted(trust, name).sum())
        found += float(accepted.sum())
        trust.learn(name, CHAIN, PROMISED, LENGTH, accepted)
    return expected / count, found / count


@pytest.mark.parametrize(
    "truth",
    [
        lambda depth: 0.9,  # as promised
        lambda depth: 0.5,  # less, everywhere
        lambda depth: 0.3 if depth == 0 else 0.95,  # a wrong place is wrong from the start
    ],
)
def test_what_is_expected_becomes_what_is_found(truth: Callable[[int], float]) -> None:
    trust, random = PathTrust(), np.random.default_rng(1)
    fresh = trusted(trust, "r")
    np.testing.assert_allclose(fresh, PROMISED, rtol=1e-3)
    drafts(trust, random, truth, count=300)
    expected, found = drafts(trust, random, truth, count=1500)
    assert expected == pytest.approx(found, rel=0.12)


def test_a_text_that_is_harder_than_others_is_expected_less_of_within_a_dozen_drafts() -> None:
    trust, random = PathTrust(), np.random.default_rng(2)
    drafts(trust, random, lambda depth: 0.9, count=400, name="easy")
    before = trusted(trust, "hard").sum()
    drafts(trust, random, lambda depth: 0.1, count=12, name="hard")
    assert trusted(trust, "hard").sum() < 0.6 * before
    assert trusted(trust, "easy").sum() > 0.7 * before
    trust.forget("hard")  # one that comes under the same name is another text
    np.testing.assert_allclose(trusted(trust, "hard"), trusted(trust, "new"))


@pytest.mark.parametrize("right", [True, False])
def test_a_surprise_after_a_long_time_changes_little(right: bool) -> None:
    """What sources say of a text that repeats itself is right for thousands of tokens."""
    trust = PathTrust()
    parent, path = np.array([-1], np.int32), np.array([0.96 if right else 0.03], np.float32)
    one = np.ones(1, np.bool_)
    for _ in range(9000):
        trust.learn("r", parent, path, 1, one if right else ~one)
        trust.forget("r")
    before = trust.corrections.copy()
    trust.learn("r", parent, path, 1, ~one if right else one)
    assert 0.0 < np.abs(trust.corrections - before).max() < 0.5
    assert np.abs(before).max() <= 4.0  # so that a lasting change is found out


def test_nodes_that_were_not_reached_or_not_verified_teach_nothing() -> None:
    trust = PathTrust()
    accepted = np.zeros(LENGTH, np.bool_)
    trust.learn("r", CHAIN, PROMISED, 0, accepted)
    assert not trust.corrections.any()
    trust.learn("r", CHAIN, PROMISED, LENGTH, accepted)  # the first one is wrong
    assert np.count_nonzero(trust.corrections) == 1
    assert trust.corrections[0].any()


def paths_of(tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_a_tree_keeps_its_nodes_and_stands_in_the_order_of_what_they_turned_out_to_be_worth() -> (
    None
):
    random = np.random.default_rng(3)
    text = random.integers(0, 4, 60).astype(np.int32)
    lookup = Lookup(
        6,
        own_text=True,
        earlier_answers=0,
        recycled_contexts=0,
        max_cache_salts=2,
        max_ngram=5,
    )
    drafting = TreeDrafts(("", "", "", "", ""), adaptive_length=True)
    request = RequestStep("r", text, 59, text[-1:].tolist(), 12, share_group=UNSALTED)
    lookup.follow(request)
    weights = drafting.calibration.hopeful
    alone = lookup.grow(request, weights, 0.0)
    # First tokens turn out to be wrong, further ones to be right.
    trust = drafting.calibration.trust
    drafts(trust, random, lambda depth: 0.2 if depth == 0 else 0.97, count=200)
    tree = drafting.grow(lookup, request, DraftCosts(0.0, 0.0, 0.0))
    assert tree_problem(tree.parents.tolist(), len(tree)) is None
    assert (np.diff(tree.paths) <= 0).all()
    said = dict(zip(paths_of(tree.tokens, tree.parents), tree.said.tolist(), strict=True))
    expected = dict(zip(paths_of(alone.tokens, alone.parents), alone.paths.tolist(), strict=True))
    assert said == pytest.approx(expected)
    assert tree.paths[0] < tree.said[0]


def test_text_that_breaks_every_copy_is_drafted_for_ever_less() -> None:
    """A fresh engine believes what stood before; a text that never goes on so tells otherwise."""
    method = SuffixTree(SuffixTree.info.options())
    assert isinstance(method.options, MethodOptions)
    from vllm_spec_ext.proposers.base import EngineHandle

    method.start(EngineHandle(500, 4096, 1, 16, "none", lambda: None))
    random = np.random.default_rng(4)
    known = random.integers(3, 400, 200)
    tokens, sizes = [*known.tolist()], []
    for step in range(30):
        # The end stood before, and what came behind it there never comes here.
        new = [*known[5 * step : 5 * step + 3].tolist(), 400 + step]
        tokens += new[:3]
        request = RequestStep(
            "r", np.array(tokens, np.int32), 200, new[:3], 16, share_group=UNSALTED
        )
        (draft,) = method.propose(StepContext([request], min_probability=0.1))
        sizes.append(len(draft))
        if len(draft):
            method.observe([StepOutcome("r", len(draft), 0, ())])
        tokens.append(new[3])
    assert sum(sizes[:3]) > 10
    assert sum(sizes[-10:]) < 0.2 * 10 * max(sizes)


@pytest.mark.parametrize("branch_cost", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("seed", range(20))
def test_branches_that_do_not_pay_are_left_out(seed: int, branch_cost: float) -> None:
    """As the plain way says: sort, take away, count anew."""
    random, size = np.random.default_rng(seed), 14
    parents = np.array([random.integers(-1, max(1, node)) for node in range(size)], np.int32)
    parents[0] = -1
    said = np.empty(size, np.float32)
    for node, parent in enumerate(parents):
        # Of a few values, so that some are equal.
        said[node] = random.choice([0.5, 0.9]) * (said[parent] if parent >= 0 else 1.0)
    tokens = np.arange(100, 100 + size, dtype=np.int32)
    evidence = np.arange(size * NUM_COLUMNS, dtype=np.int16).reshape(size, NUM_COLUMNS)
    tree = Candidates(parents, tokens, said, evidence, said)
    trust = PathTrust()
    drafts(trust, random, lambda depth: 0.6, count=20)
    alone = trust.best_part("r", tree, 0.1, 0.0)
    order = alone.tokens - 100
    assert sorted(order.tolist()) == list(range(size))
    assert (np.diff(alone.paths) <= 0.0).all()
    equal = np.diff(alone.paths) == 0.0
    assert (np.diff(order)[equal] > 0).all(), "equals keep their order"
    assert [order[parent] if parent >= 0 else -1 for parent in alone.parents] == parents[
        order
    ].tolist()
    found = trust.best_part("r", tree, 0.1, branch_cost)
    # Nodes that cost more than they give are left out later, or tried all the same.
    gains = np.maximum(alone.paths - np.float32(0.1), 0.0)
    kept = paying_nodes(alone.parents, gains, branch_cost)
    if kept is None:
        kept = np.arange(size, dtype=np.int32)
    assert found.parents.tolist() == parents_among(alone.parents, kept).tolist()
    assert found.tokens.tolist() == alone.tokens[kept].tolist()
    assert found.paths.tolist() == alone.paths[kept].tolist()
    assert found.evidence.tolist() == evidence[order[kept]].tolist()
    assert found.said.tolist() == said[order[kept]].tolist()
