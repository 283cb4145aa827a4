# SPDX-License-Identifier: Apache-2.0
"""Trees of one model: what is read, what is chosen, what is drawn; the fake checks the contract."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from fake_model import FakeModel, NextLogits, engine, random_next_logits, request, step

from vllm_spec_ext.options import MethodOptions, parse_options
from vllm_spec_ext.proposers.base import Draft
from vllm_spec_ext.proposers.draft_tree import is_path, parents_of, tree_problem
from vllm_spec_ext.proposers.growth.tree_drafting import TreeDrafting
from vllm_spec_ext.proposers.small_model import SmallModel
from vllm_spec_ext.proposers.token_tree import TokenTree

VOCAB = 7


def started(
    cls: type[TreeDrafting], *models: FakeModel, num_speculative_tokens: int = 16, **given: object
) -> TreeDrafting:
    names = ["m"] * len(models)
    which = {"model": "m"} if cls is SmallModel else {"models": names}
    options: MethodOptions = parse_options(cls.info.options, {**which, **given}, cls.info.name)
    proposer = cls(options)
    proposer.start(engine(*models, num_speculative_tokens=num_speculative_tokens))
    return proposer


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def likeliest(
    next_logits: NextLogits, text: Sequence[int], depth: int, width: int, budget: int
) -> set[tuple]:
    """Paths of the best tree by brute force: the likeliest ones among the best candidates."""
    found = {}
    for size in range(1, depth + 1):
        for path in itertools.product(range(VOCAB), repeat=size):
            log_prob, read = 0.0, list(text)
            for token in path:
                probs = softmax(next_logits(read))
                if (probs > probs[token]).sum() >= width:
                    break
                log_prob += math.log(probs[token])
                read.append(token)
            else:
                found[path] = log_prob
    return set(sorted(found, key=lambda path: -found[path])[:budget])


def paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), parents_of(draft), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_a_chain_is_what_the_model_would_say() -> None:
    next_logits = random_next_logits(0, VOCAB)
    model = FakeModel(next_logits, VOCAB)
    (draft,) = started(SmallModel, model, num_speculative_tokens=5).propose(step(request()))
    text = [1, 2, 3]
    for _ in range(5):
        text.append(int(next_logits(text).argmax()))
    assert draft.tokens.tolist() == text[3:]
    assert draft.parents is None
    assert draft.probs is None
    assert draft.sources is None
    assert model.num_passes == 5
    assert model.read[-1] == [text[:-1]]  # the last token is not read


def test_one_pass_a_level_serves_all_requests() -> None:
    model = FakeModel(random_next_logits(1, VOCAB), VOCAB)
    requests = [request([1, 2, i], name=str(i), room=i) for i in range(5)]
    drafts = started(SmallModel, model, num_speculative_tokens=4).propose(step(*requests))
    assert [len(draft) for draft in drafts] == [0, 1, 2, 3, 4]
    assert model.synced == [["1", "2", "3", "4"]]  # nothing is read without room
    assert [len(texts) for texts in model.read] == [3, 2, 1]


def test_without_room_no_pass_is_run() -> None:
    model = FakeModel(random_next_logits(1, VOCAB), VOCAB)
    proposer = started(SmallModel, model)
    assert [len(d) for d in proposer.propose(step(request(room=0)))] == [0]
    assert proposer.propose(step()) == []
    assert model.num_passes == 0


def test_a_model_that_cannot_follow_drafts_nothing() -> None:
    model = FakeModel(random_next_logits(1, VOCAB), VOCAB, max_model_len=4)
    proposer = started(SmallModel, model)
    long, short = request([1] * 5, name="long"), request(name="short")
    drafts = proposer.propose(step(long, short))
    assert [len(draft) for draft in drafts] == [0, 2]  # one token is read, then it is full


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 4, 9])
def test_a_dynamic_tree_has_the_likeliest_paths(seed: int, budget: int) -> None:
    next_logits = random_next_logits(seed, VOCAB)
    model = FakeModel(next_logits, VOCAB)
    proposer = started(
        TokenTree, model, candidates=3, max_depth=4, max_branches=VOCAB**3, adaptive_length=False
    )
    (draft,) = proposer.propose(step(request(room=budget)))
    assert set(paths(draft)) == likeliest(next_logits, [1, 2, 3], 4, 3, budget)
    assert draft.path_probs is not None
    parents = parents_of(draft)
    assert tree_problem(parents, len(draft)) is None
    # Cutting the end of a draft keeps its likeliest path.
    best = max(paths(draft), key=len)
    first = [i for i in range(len(draft)) if parents[i] == i - 1 and is_path(range(i + 1), parents)]
    greedy: list[int] = []
    while tuple(greedy) in {(), *paths(draft)}:
        greedy.append(int(next_logits([1, 2, 3, *greedy]).argmax()))
    assert draft.tokens[first].tolist() == greedy[: len(first)]
    assert len(first) == len(greedy) - 1 <= len(best)


def test_each_branch_has_read_its_own_path() -> None:
    model = FakeModel(random_next_logits(3, VOCAB), VOCAB)
    proposer = started(TokenTree, model, expansion=[2, 2, 2], num_speculative_tokens=14)
    (draft,) = proposer.propose(step(request()))
    assert len(draft) == 14
    drafted = {(1, 2, 3, *path) for path in paths(draft)}
    read = [tuple(text) for texts in model.read for text in texts]
    assert set(read) == {path for path in drafted if len(path) < 6}
    assert len(read) == len(set(read))


def test_an_expansion_tree_takes_the_best_children() -> None:
    next_logits = random_next_logits(4, VOCAB)
    model = FakeModel(next_logits, VOCAB)
    proposer = started(TokenTree, model, expansion=[1, 3, 1], num_speculative_tokens=7)
    (draft,) = proposer.propose(step(request()))
    found = paths(draft)
    assert sorted(map(len, found)) == [1, 2, 2, 2, 3, 3, 3]
    top = int(next_logits([1, 2, 3]).argmax())
    second = np.argsort(-next_logits([1, 2, 3, top]))[:3].tolist()
    assert [path for path in found if len(path) == 1] == [(top,)]
    assert {path[1] for path in found if len(path) == 2} == set(second)
    for token in second:
        assert (top, token, int(next_logits([1, 2, 3, top, token]).argmax())) in found
    assert found[1] == (top, second[0])


def test_a_fork_without_room_costs_its_branch_alone() -> None:
    whole = FakeModel(random_next_logits(5, VOCAB), VOCAB)
    tight = FakeModel(random_next_logits(5, VOCAB), VOCAB, num_forks=1)
    given = {"expansion": [3, 1, 1], "num_speculative_tokens": 9}
    (expected,) = started(TokenTree, whole, **given).propose(step(request()))  # type: ignore[arg-type]
    (draft,) = started(TokenTree, tight, **given).propose(step(request()))  # type: ignore[arg-type]
    assert len(draft) == 7  # the third child has no children
    assert set(paths(draft)) < set(paths(expected))


def test_a_branch_that_dies_keeps_what_it_drafted() -> None:
    model = FakeModel(random_next_logits(5, VOCAB), VOCAB, most_read=1)
    (draft,) = started(TokenTree, model, expansion=[2, 1, 1]).propose(step(request()))
    assert sorted(map(len, paths(draft))) == [1, 1, 2, 2]


def test_temperature_draws_and_a_seed_chooses() -> None:
    next_logits = random_next_logits(6, VOCAB)
    requests = [
        request(name="drawn", temperature=0.7),
        request(name="seeded", temperature=0.7, seed=3),
        request(name="greedy"),
    ]
    proposer = started(SmallModel, FakeModel(next_logits, VOCAB), num_speculative_tokens=3)
    drawn, seeded, greedy = proposer.propose(step(*requests))
    assert drawn.probs is not None
    text = [1, 2, 3]
    for token, row in zip(drawn.tokens.tolist(), drawn.probs.numpy(), strict=True):
        assert row == pytest.approx(softmax(next_logits(text) / 0.7), abs=1e-6)
        text.append(token)
    assert seeded.probs is None
    assert greedy.probs is None
    assert seeded.tokens.tolist() == greedy.tokens.tolist()
    chooses = started(
        SmallModel, FakeModel(next_logits, VOCAB), num_speculative_tokens=3, draw=False
    )
    assert not chooses.needs.distributions
    (chosen,) = chooses.propose(step(requests[0]))
    assert chosen.probs is None


def test_draws_use_the_requests_filters() -> None:
    next_logits = random_next_logits(6, VOCAB)
    proposer = started(SmallModel, FakeModel(next_logits, VOCAB), num_speculative_tokens=3)
    (draft,) = proposer.propose(step(request(temperature=1.0, top_k=2)))
    assert draft.probs is not None
    assert ((draft.probs > 0).sum(dim=1) == 2).all()


def test_the_same_draws_in_another_batch_and_another_process() -> None:
    next_logits = random_next_logits(7, VOCAB)
    drafts = []
    for others in ((), (request([3, 3, 3], name="x", temperature=1.0),)):
        proposer = started(TokenTree, FakeModel(next_logits, VOCAB), expansion=[2, 2])
        asked = request(temperature=1.3)
        drafts.append(proposer.propose(step(*others, asked))[-1])
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert drafts[0].probs is not None
    assert drafts[1].probs is not None
    assert (drafts[0].probs == drafts[1].probs).all()
    proposer = started(TokenTree, FakeModel(next_logits, VOCAB), expansion=[2, 2])
    (other,) = proposer.propose(step(request(name="b", temperature=1.3)))
    assert other.tokens.tolist() != drafts[0].tokens.tolist()


def test_the_shape_of_a_drawn_tree_says_nothing_of_its_tokens() -> None:
    """Of many requests with the same text, whatever is drawn, whatever finds no room."""
    model = FakeModel(random_next_logits(8, VOCAB), VOCAB, num_forks=20)
    for given in ({"expansion": [2, 2, 1]}, {}):
        proposer = started(TokenTree, model, num_speculative_tokens=10, **given)
        requests = [request(name=str(i), temperature=1.0, room=10) for i in range(30)]
        drafts = proposer.propose(step(*requests))
        shapes = [tuple(parents_of(draft)) for draft in drafts]
        assert len({tuple(draft.tokens.tolist()) for draft in drafts}) > 20
        # Forks are given in the order of requests: first whole trees, then cut ones.
        assert shapes == sorted(shapes, key=len, reverse=True)
        assert len(set(shapes)) > 1
        found = {draft.path_probs.tolist()[0] for draft in drafts if draft.path_probs is not None}
        assert len(found) == 1
