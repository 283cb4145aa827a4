# SPDX-License-Identifier: Apache-2.0
"""The proposer of blocks with a stand-in for the drafter: chains, trees, draws, lengths."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.base import (
    Draft,
    EngineHandle,
    RequestStep,
    StepContext,
    StepOutcome,
    TargetFacts,
)
from vllm_spec_ext.proposers.models import BlockFacts, BlockWeights, SlotCandidates, SlotHint
from vllm_spec_ext.proposers.nar import Nar
from vllm_spec_ext.proposers.nar.copy_tail import CopyTail
from vllm_spec_ext.proposers.nar.options import NarOptions

VOCAB = 50


class StandIn:
    """Slots always predict the same candidates."""

    name, max_model_len = "nar", 1000

    def __init__(self, facts: BlockFacts, tokens: list[list[int]], probs: Any) -> None:
        self.facts = facts
        self.tokens = np.array(tokens, np.int32)
        self.log_probs = np.log(np.array(probs, np.float32))
        self.calls: list[tuple[int, int, Sequence[SlotHint | None] | None]] = []
        self.seconds: float | None = None

    def predict(
        self,
        requests: Sequence[RequestStep],
        rows: Sequence[int],
        num_slots: int,
        num_candidates: int,
        hints: Sequence[SlotHint | None] | None = None,
    ) -> list[SlotCandidates | None]:
        self.calls.append((num_slots, num_candidates, hints))
        found: list[SlotCandidates | None] = []
        for row in rows:
            size = min(num_slots, requests[row].room)
            one = SlotCandidates(self.tokens[:size], self.log_probs[:size])
            found.append(None if requests[row].request_id == "gap" else one)
        return found

    def forward_seconds(self, num_rows: int) -> float | None:
        return self.seconds

    def exchange(self, weights: BlockWeights) -> None:
        raise AssertionError("nothing learns here")


FACTS = BlockFacts(3, copy_match=4)
TOKENS = [[1, 2], [3, 4], [5, 6]]
ALONE = [[[0.6, 0.3]], [[0.5, 0.4]], [[0.9, 0.1]]]
# Behind 1 comes 4, behind 2 comes 3.
PAIRS = [
    [[0.5, 0.45], [0.5, 0.45]],
    [[0.1, 0.8], [0.95, 0.05]],
    [[0.9, 0.1], [0.2, 0.7]],
]


def started(drafter: StandIn, number: int = 8, **options: Any) -> Nar:
    proposer = Nar(NarOptions(model="x", adaptive_length=False, **options))
    proposer.start(
        EngineHandle(
            vocab_size=VOCAB,
            max_model_len=128,
            max_num_seqs=4,
            num_speculative_tokens=number,
            model="stand-in",
            load_tokenizer=lambda: None,
            block_drafters=[drafter],
        )
    )
    return proposer


def request(name: str = "a", room: int = 8, length: int = 6, **sampling: Any) -> RequestStep:
    tokens = np.arange(10, 10 + length, dtype=np.int32)
    return RequestStep(name, tokens, 2, [int(tokens[-1])], room, **sampling)


def test_chain_of_the_likeliest() -> None:
    drafter = StandIn(FACTS, TOKENS, ALONE)
    proposer = started(drafter)
    drafts = proposer.propose(StepContext([request(), request("b", 2), request("c", 0)]))
    assert [draft.tokens.tolist() for draft in drafts] == [[1, 3, 5], [1, 3], []]
    assert drafts[0].path_probs is not None
    assert drafts[0].path_probs.tolist() == pytest.approx([0.6, 0.3, 0.27])
    assert drafter.calls[0][:2] == (3, 1)
    assert proposer.propose(StepContext([request("gap")]))[0].tokens.tolist() == []


def test_chain_follows_the_pairs() -> None:
    drafter = StandIn(BlockFacts(3, has_selector=True), TOKENS, PAIRS)
    (draft,) = started(drafter).propose(StepContext([request()]))
    assert draft.tokens.tolist() == [1, 4, 6]
    assert drafter.calls[0][1] == 16


def test_tree_of_the_likeliest_paths() -> None:
    drafter = StandIn(BlockFacts(3, has_selector=True), TOKENS, PAIRS)
    proposer = started(drafter, tree=True, candidates=2)
    (draft,) = proposer.propose(StepContext([request(room=5)]))
    # 1 (.5), 2 (.45), 2 3 (.43), 1 4 (.4), 2 3 5 (.38)
    assert draft.tokens.tolist() == [1, 4, 2, 3, 5]
    assert draft.parents is not None
    assert draft.parents.tolist() == [-1, 0, -1, 2, 3]
    assert drafter.calls[0][:2] == (3, 2)


def test_slots_and_limits() -> None:
    drafter = StandIn(FACTS, TOKENS, ALONE)
    assert len(started(drafter, slots=2).propose(StepContext([request()]))[0]) == 2
    assert len(started(drafter, number=1).propose(StepContext([request()]))[0]) == 1
    assert len(started(drafter, min_confidence=0.28).propose(StepContext([request()]))[0]) == 2
    assert len(started(drafter, min_confidence=0.7).propose(StepContext([request()]))[0]) == 0
    with pytest.raises(ValidationError, match="drafts chains"):
        NarOptions(model="x", tree=True, draw=True)
    with pytest.raises(SpecExtError, match="found 0 loaded drafters"):
        Nar(NarOptions(model="x")).start(
            EngineHandle(VOCAB, 10, 1, 4, "stand-in", load_tokenizer=lambda: None)
        )


def test_copies_are_shown_unless_switched_off() -> None:
    step = StepContext(
        [RequestStep("a", np.array([7, 8, 9, 7, 8], np.int32), 2, [8], 4), request("b")]
    )
    drafter = StandIn(FACTS, TOKENS, ALONE)
    proposer = started(drafter)
    proposer.propose(step)
    hints = drafter.calls[-1][2]
    assert hints is not None
    assert hints[0] is not None
    assert hints[0].tokens.tolist() == [9, 7, 8]
    assert hints[0].kind == 2
    assert hints[1] is None
    assert proposer._hints is not None
    proposer.finish(["a", "b", "unknown"])
    assert len(proposer._hints) == 0
    started(drafter, copies=False).propose(step)
    assert drafter.calls[-1][2] is None


def test_draws_follow_their_distribution() -> None:
    drafter = StandIn(BlockFacts(3, has_selector=True), TOKENS, PAIRS)
    proposer = started(drafter, draw=True, candidates=2)
    firsts: Counter[int] = Counter()
    seconds: Counter[tuple[int, int]] = Counter()
    for number in range(2000):
        one = request(f"r{number}", temperature=1.0)
        (draft,) = proposer.propose(StepContext([one]))
        assert draft.probs is not None
        assert draft.probs.shape == (3, VOCAB)
        assert draft.probs.sum(dim=-1).tolist() == pytest.approx([1.0] * 3)
        first, second = draft.tokens[:2].tolist()
        firsts[first] += 1
        seconds[first, second] += 1
        assert float(draft.probs[1, 3]) == pytest.approx(0.1 / 0.9 if first == 1 else 0.95)
    assert firsts[1] / 2000 == pytest.approx(0.5 / 0.95, abs=0.04)
    assert seconds[2, 3] / firsts[2] == pytest.approx(0.95, abs=0.03)
    for chosen in (request(seed=3, temperature=1.0), request()):
        (draft,) = proposer.propose(StepContext([chosen]))
        assert draft.probs is None
        assert draft.tokens.tolist() == [1, 4, 6]
    again = [proposer.propose(StepContext([one]))[0].tokens.tolist() for _ in range(2)]
    assert again[0] == again[1]


def test_a_pass_that_does_not_pay_is_left_out_and_tried_again() -> None:
    drafter = StandIn(FACTS, TOKENS, ALONE)
    proposer = started(drafter)
    proposer.options = proposer._options = NarOptions(model="x")
    drafter.seconds = 0.5
    for _ in range(200):
        drafts = proposer.propose(StepContext([request()], None, 0.1, 1.0))
        if len(drafts[0]):
            proposer.observe([StepOutcome("a", len(drafts[0]), 0)])
    assert 3 <= len(drafter.calls) < 100
    drafter.calls.clear()
    drafter.seconds = 0.01
    for _ in range(20):
        drafts = proposer.propose(StepContext([request()], None, 0.001, 1.0))
        proposer.observe([StepOutcome("a", len(drafts[0]), len(drafts[0]))])
    assert len(drafter.calls) >= 19


COPIED = RequestStep("a", np.array([1, 3, 5, 8, 9, 8, 7, 1, 3, 5, 8, 9], np.int32), 2, [9], 8)
# The slots are shown 8 7 1; behind them the copy goes on with 3 5 8 9 8.
SHOWN = [[2, 8], [7, 4], [1, 6]]


@pytest.mark.parametrize("tree", [False, True])
def test_a_copy_that_fills_the_block_goes_on_behind_it(tree: bool) -> None:
    likely = [[[0.3, 0.6]], [[0.8, 0.1]], [[0.9, 0.05]]]
    drafter = StandIn(FACTS, SHOWN, likely)
    proposer = started(drafter, tree=tree, candidates=2)
    (draft,) = proposer.propose(StepContext([COPIED]))
    assert drafter.calls[-1][2][0].tokens.tolist() == [8, 7, 1]  # type: ignore[index, union-attr]
    path = [8, 7, 1, 3, 5, 8, 9, 8]
    if not tree:
        assert draft.tokens.tolist() == path
        assert draft.path_probs is not None
        assert draft.path_probs[2:5].tolist() == pytest.approx(
            [0.432, 0.432 * 0.9, 0.432 * 0.81], rel=1e-4
        )
    else:  # other branches compete for the nodes: 2 (.3), 2 7 (.24), 2 7 1 (.22)
        assert draft.tokens.tolist()[:5] == path[:5]
        assert 2 in draft.tokens.tolist()
        assert len(draft) == 8
    short = StepContext([RequestStep("a", COPIED.token_ids, 2, [9], 3)])
    assert proposer.propose(short)[0].tokens.tolist()[:3] == [8, 7, 1]
    proposer.finish(["a"])
    assert len(proposer._tail) == 0


def test_a_copy_ends_where_the_target_cannot_say_it() -> None:
    """Ids beyond its vocabulary stand for pictures in a prompt."""
    text = [1, 3, 5, 8, 9, 8, 7, 1, 4, VOCAB + 5, 2, 1, 3, 5, 8, 9]
    tokens = np.array(text, np.int32)
    drafter = StandIn(FACTS, SHOWN, [[[0.3, 0.6]], [[0.8, 0.1]], [[0.9, 0.05]]])
    request = RequestStep("a", tokens, 2, [9], 8)
    (draft,) = started(drafter, candidates=2).propose(StepContext([request]))
    assert draft.tokens.tolist() == [8, 7, 1, 4]


def test_a_chain_that_leaves_the_copy_ends_with_the_block() -> None:
    drafter = StandIn(FACTS, SHOWN, [[[0.3, 0.6]], [[0.8, 0.1]], [[0.05, 0.9]]])
    (draft,) = started(drafter, candidates=2).propose(StepContext([COPIED]))
    assert draft.tokens.tolist() == [8, 7, 6]
    drafter = StandIn(FACTS, [[2, 8], [7, 4], [6, 4]], ALONE)  # 1 is no candidate
    assert len(started(drafter, candidates=2).propose(StepContext([COPIED]))[0]) == 3


def test_how_often_copies_go_on_is_learned() -> None:
    tail = CopyTail()
    draft = Draft(np.arange(6, dtype=np.int32))
    for accepted in ([0, 1, 2, 3], [0, 1], [0, 1, 2]):  # with blocks of 3 slots: 1 of 2, and 0 of 1
        tail.drafted("a", draft, 3)
        tail.verified("a", 6, accepted)
    assert tail.probability == pytest.approx((9 + 1) / (10 + 3), abs=0.01)
    tail.drafted("a", draft, 3)
    tail.verified("a", 3, [0, 1, 2])  # the engine verified the block alone
    assert tail.probability == pytest.approx((9 + 1) / (10 + 3), abs=0.01)
    tree = Draft(np.arange(5, dtype=np.int32), np.array([-1, -1, 1, 2, 3], np.int32))
    tail.drafted("b", tree, 3)  # only the last node stands behind the block
    tail.verified("b", 5, [1, 2, 3, 4])
    assert tail.probability == pytest.approx((9 + 2) / (10 + 4), abs=0.01)
    tail.verified("unknown", 1, [])
    assert len(tail) == 0


def test_more_masks_than_draft_tokens_are_refused() -> None:
    facts = TargetFacts("MODEL", 10, 8, 4, lambda: None)
    Nar.check(NarOptions(model="m", slots=4), facts)
    with pytest.raises(SpecExtError, match=r"slots: found 15, expected at most .*, 4"):
        Nar.check(NarOptions(model="m", slots=15), facts)
