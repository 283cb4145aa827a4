# SPDX-License-Identifier: Apache-2.0
"""What sources promise too much or too little of is found out, by depth and by request."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import UNSALTED, RequestStep, StepContext, StepOutcome
from vllm_spec_ext.proposers.candidates.lookup import Lookup
from vllm_spec_ext.proposers.candidates.path_trust import PathTrust
from vllm_spec_ext.proposers.candidates.tree_drafts import DraftCosts, TreeDrafts
from vllm_spec_ext.proposers.draft_tree import tree_problem
from vllm_spec_ext.proposers.suffix_tree import SuffixTree

LENGTH = 10
CHAIN = np.arange(-1, LENGTH - 1, dtype=np.int32)
PROMISED = np.cumprod(np.full(LENGTH, 0.9)).astype(np.float32)  # 5.86 tokens


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
        expected += float(trust.corrected(name, CHAIN, PROMISED).sum())
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
    fresh = trust.corrected("r", CHAIN, PROMISED)
    np.testing.assert_allclose(fresh, PROMISED, rtol=1e-3)
    drafts(trust, random, truth, count=300)
    expected, found = drafts(trust, random, truth, count=1500)
    assert expected == pytest.approx(found, rel=0.12)


def test_a_text_that_is_harder_than_others_is_expected_less_of_within_a_dozen_drafts() -> None:
    trust, random = PathTrust(), np.random.default_rng(2)
    drafts(trust, random, lambda depth: 0.9, count=400, name="easy")
    before = trust.corrected("hard", CHAIN, PROMISED).sum()
    drafts(trust, random, lambda depth: 0.1, count=12, name="hard")
    assert trust.corrected("hard", CHAIN, PROMISED).sum() < 0.6 * before
    assert trust.corrected("easy", CHAIN, PROMISED).sum() > 0.7 * before
    trust.forget("hard")  # one that comes under the same name is another text
    np.testing.assert_allclose(
        trust.corrected("hard", CHAIN, PROMISED), trust.corrected("new", CHAIN, PROMISED)
    )


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
