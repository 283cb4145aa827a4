# SPDX-License-Identifier: Apache-2.0
"""Drawn trees of one and two models, verified as the engine does: the text is the target's.

Draft distributions are far from the target's. The known ways to get it wrong fail the same test.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import FakeModel, engine, random_next_logits, request, step

from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers.base import Draft
from vllm_spec_ext.proposers.draft_tree import parents_of
from vllm_spec_ext.proposers.growth import levels, merging, tree_drafting
from vllm_spec_ext.proposers.growth.merging import MergedTree
from vllm_spec_ext.proposers.token_tree import TokenTree
from vllm_spec_ext.scorers.walk.multi_step import draw_uniforms, multi_step

VOCAB = 6
NUM_REQUESTS = 5000
TEXT = [1, 2, 3]
TARGET = random_next_logits(100, VOCAB, sharpness=1.2)
OTHERS = [random_next_logits(seed, VOCAB, sharpness=1.2) for seed in (101, 102)]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def target(text: Sequence[int]) -> np.ndarray:
    return softmax(TARGET(text))


def drafts_of(num_models: int, room: int = 16, **given: Any) -> list[Draft]:
    """Of many requests with the same text and a budget."""
    models = [
        FakeModel(next_logits, VOCAB, name=f"m{i}")
        for i, next_logits in enumerate(OTHERS[:num_models])
    ]
    names = [model.name for model in models]
    options = parse_options(TokenTree.info.options, {"models": names, **given}, "token_tree")
    proposer = TokenTree(options)
    proposer.start(engine(*models))
    requests = [request(TEXT, name=str(i), temperature=1.0, room=room) for i in range(NUM_REQUESTS)]
    drafts = proposer.propose(step(*requests))
    assert all(draft.probs is not None for draft in drafts)
    return drafts


def verify(drafts: Sequence[Draft]) -> tuple[np.ndarray, int]:
    """Counts of the first two tokens, and how many draft tokens were accepted."""
    p, parents, tokens, starts = [], [], [], [0]
    known: dict[tuple[int, ...], np.ndarray] = {}
    for draft in drafts:
        texts: list[tuple[int, ...]] = [tuple(TEXT)]
        up = parents_of(draft)
        for token, parent in zip(draft.tokens.tolist(), up, strict=True):
            texts.append((*texts[parent + 1], token))
        p += [known.setdefault(text[-2:], target(text)) for text in texts]
        parents += up
        tokens += draft.tokens.tolist()
        starts.append(starts[-1] + len(draft))
    found = multi_step(
        np.stack(p),
        np.array(parents),
        np.array(tokens),
        np.array(starts),
        torch.cat([draft.probs for draft in drafts if draft.probs is not None]),
        uniforms=draw_uniforms(np.array(starts), torch.Generator().manual_seed(1)),
        drawn="iid",
    )
    rng = np.random.default_rng(2)
    counts = np.zeros((VOCAB, VOCAB))
    for first, *rest in found.emitted.tolist():
        second = rest[0] if rest and rest[0] >= 0 else rng.choice(VOCAB, p=target([*TEXT, first]))
        counts[first, second] += 1
    return counts.ravel(), int(found.num_accepted.sum())


def fits(counts: np.ndarray) -> bool:
    """Chi-square at a level of about 1e-6 (Wilson-Hilferty)."""
    first = target(TEXT)
    joint = np.concatenate([first[a] * target([*TEXT, a]) for a in range(VOCAB)])
    expected = joint * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    dof = len(expected) - 1
    spread = 2 / (9 * dof)
    return statistic < dof * (1 - spread + 4.75 * spread**0.5) ** 3


def test_draft_and_target_are_far_apart() -> None:
    for next_logits in OTHERS:
        distance = 0.5 * np.abs(target(TEXT) - softmax(next_logits(TEXT))).sum()
        assert distance > 0.3


@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize(
    "given", [{"expansion": [1, 1]}, {"expansion": [3, 1, 1]}, {"expansion": [2, 2]}, {}]
)
def test_the_text_is_the_targets(num_models: int, given: dict[str, Any]) -> None:
    counts, num_accepted = verify(drafts_of(num_models, **given))
    assert num_accepted >= 2000
    assert fits(counts)


@pytest.mark.parametrize("room", [3, 4, 5])
def test_whatever_is_cut_off_at_the_end(room: int) -> None:
    """By the engine, which knows nothing of trees; and by a small budget."""
    cut = [
        Draft(
            draft.tokens[:room],
            np.array(parents_of(draft)[:room], np.int32),
            None if draft.probs is None else draft.probs[:room],
        )
        for draft in drafts_of(2, expansion=[2, 2])
    ]
    for drafts in (cut, drafts_of(2, room=room, expansion=[2, 2])):
        counts, num_accepted = verify(drafts)
        assert num_accepted >= 2000
        assert fits(counts)


def best_children(probs: torch.Tensor, numbers: np.ndarray) -> np.ndarray:
    """The bug of reference codes: the likeliest tokens, with the model's probabilities."""
    found = probs.topk(numbers.shape[1], dim=-1).indices
    return found.to(torch.int32).numpy()


def rebuilt(merged: MergedTree, order: Sequence[int]) -> MergedTree:
    """A tree of some nodes of another, in this order."""
    place = {-1: -1, **{node: i for i, node in enumerate(order)}}
    assert merged.rows is not None
    return MergedTree(
        [merged.tokens[node] for node in order],
        [place[merged.parents[node]] for node in order],
        [merged.probs[node] for node in order],
        [merged.promises[node] for node in order],
        [merged.barren[node] for node in order],
        [merged.ranks[node] for node in order],
        [merged.rows[node] for node in order],
    )


def without(
    merged: MergedTree, dropped: Callable[[MergedTree, int, list[int]], bool]
) -> MergedTree:
    """A tree without some nodes and what hangs below them; of siblings, the first ones come first.

    Args:
        merged: The tree.
        dropped: Of tree, node, and the siblings that stay so far.
    """
    kept: list[int] = []
    for node, parent in enumerate(merged.parents):
        siblings = [other for other in kept if merged.parents[other] == parent]
        if (parent == -1 or parent in kept) and not dropped(merged, node, siblings):
            kept.append(node)
    return rebuilt(merged, kept)


def is_duplicate(merged: MergedTree, node: int, siblings: list[int]) -> bool:
    return any(merged.tokens[other] == merged.tokens[node] for other in siblings)


def is_unlikely(merged: MergedTree, node: int, siblings: list[int]) -> bool:
    """What a cut at a probability would leave out, but for the first of the siblings."""
    assert merged.rows is not None
    return bool(siblings) and float(merged.rows[node][merged.tokens[node]]) < 0.25


def likeliest_first(merged: MergedTree) -> MergedTree:
    """Siblings in the order of their probability, as a cut by it would want them."""
    assert merged.rows is not None
    rows, tokens = merged.rows, merged.tokens
    order: list[int] = []
    stack = [-1]
    while stack:
        node = stack.pop()
        if node >= 0:
            order.append(node)
        below = [child for child, parent in enumerate(merged.parents) if parent == node]
        stack += sorted(below, key=lambda child: float(rows[child][tokens[child]]))
    return rebuilt(merged, order)


@pytest.mark.parametrize(
    "mutation", ["best children", "merged duplicates", "cut by token", "sorted by token"]
)
def test_the_known_mistakes_are_found_out(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = merging.join_drawn
    mutations: dict[str, Callable[[MergedTree], MergedTree]] = {
        "merged duplicates": lambda merged: without(merged, is_duplicate),
        "cut by token": lambda merged: without(merged, is_unlikely),
        "sorted by token": likeliest_first,
    }
    if mutation == "best children":
        monkeypatch.setattr(levels, "draw", best_children)
    else:
        change = mutations[mutation]
        monkeypatch.setattr(tree_drafting, "join_drawn", lambda trees: change(original(trees)))
    counts, _ = verify(drafts_of(2, expansion=[3, 1]))
    assert not fits(counts)


def test_a_union_keeps_duplicates_with_their_own_distributions() -> None:
    drafts = drafts_of(2, expansion=[2])
    next_probs = [softmax(next_logits(TEXT)) for next_logits in OTHERS]
    repeated = 0
    for draft in drafts[:200]:
        assert draft.probs is not None
        assert draft.sources == (("m0",), ("m0",), ("m1",), ("m1",))
        assert parents_of(draft) == [-1] * 4
        for row, (name,) in zip(draft.probs.numpy(), draft.sources, strict=True):
            assert row == pytest.approx(next_probs[int(name[1])], abs=1e-6)
        repeated += len(set(draft.tokens.tolist())) < 4
    assert repeated > 20
