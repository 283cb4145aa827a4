# SPDX-License-Identifier: Apache-2.0
"""The books of draft models against dense computation, on a toy of paged attention.

Every row of logits that a proposer could see is compared. Three negative controls take out one
part of the bookkeeping each; without them the comparison would prove nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from paged_toy import VOCAB, ToyModel
from toy_simulation import BLOCK, BLOCKS, SCRATCH, Drafts, Floats, Simulation

from vllm_spec_ext.engine.models.branches import Scratch
from vllm_spec_ext.engine.models.filled_blocks import FilledBlocks
from vllm_spec_ext.engine.models.forward_times import ForwardTimes
from vllm_spec_ext.engine.models.hosted_model import BatchRow, HostedModel
from vllm_spec_ext.proposers.records import RequestStep


def hosted(
    runner: Any,
    max_model_len: int = 64,
    max_rows: int = 40,
    scratch: int = SCRATCH,
    vocab: int = VOCAB,
) -> HostedModel:
    model = HostedModel(
        "toy",
        runner,
        num_ids=VOCAB,
        vocab_size=vocab,
        max_model_len=max_model_len,
        max_rows=max_rows,
    )
    model.bind(BLOCKS, BLOCK, range(BLOCKS, BLOCKS + scratch))
    return model


class TwoModels(Simulation):
    """Both draft for the same requests; one of them reads less far."""

    def __init__(self, seed: int, skip: float = 0.3) -> None:
        super().__init__(seed, skip, ahead=0, sessions=0.3)
        size = BLOCKS + SCRATCH
        self.toys = [ToyModel(seed, size, BLOCK) for seed in (1, 2)]
        self.models = [hosted(self.toys[0]), hosted(self.toys[1], max_model_len=30)]
        self.behind = 0

    def truth(self, tokens: Sequence[int]) -> int:
        """The target agrees with the first model three times in four."""
        if hash(tuple(tokens)) % 4:
            return int(self.toys[0].dense(tokens)[-1].argmax())
        return hash(tuple(tokens)) % VOCAB

    def drafts(self, requests: Sequence[RequestStep]) -> Drafts:
        found: Drafts = {}
        for model in self.models:
            if self.rng.random() < 0.9:
                rows = [row for row in range(len(requests)) if self.rng.random() < 0.9]
                paths, refused = self.draft_with(model, requests, rows)
                found |= paths
                self.behind += sum(
                    len(requests[row].token_ids) + 3 <= model.max_model_len for row in refused
                )
        return found

    def dense(self, model: HostedModel, text: Sequence[int], num_certain: int) -> Floats:
        return self.toys[self.models.index(model)].dense(text)


@pytest.mark.parametrize("seed", range(4))
def test_every_row_equals_a_dense_computation(seed: int) -> None:
    simulation = TwoModels(seed)
    simulation.run(80)
    scheduler = simulation.scheduler
    assert simulation.wrong == 0
    assert simulation.rows > 1500
    assert scheduler.num_hits > 50
    assert scheduler.num_preempted > 3
    assert scheduler.num_sessions > 3
    assert simulation.behind > 0  # some needed several steps to catch up
    assert all(model.scratch.most_used > 3 for model in simulation.models)


@pytest.mark.parametrize("seed", range(1))
def test_without_skipped_steps_nobody_falls_behind(seed: int) -> None:
    simulation = TwoModels(seed, skip=0.0).run(60)
    assert simulation.wrong == 0


def no_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ToyModel, "copy_blocks", lambda self, pairs: None)


def no_forgetting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostedModel, "forget", lambda self, ids: None)


def no_invalidation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FilledBlocks, "allocate", lambda self, blocks: None)
    patch.setattr(FilledBlocks, "enter", lambda self, blocks, num_computed: None)


def no_truncation(patch: pytest.MonkeyPatch) -> None:
    """A session goes on in a block whose last position holds the token that was taken back."""
    enter = FilledBlocks.enter

    def enter_rounded(self: FilledBlocks, blocks: Sequence[int], num_computed: int) -> None:
        enter(self, blocks, -(-num_computed // BLOCK) * BLOCK)

    patch.setattr(FilledBlocks, "enter", enter_rounded)


def tail_of_scratch(patch: pytest.MonkeyPatch) -> None:
    """The prototype's bug: KV that went to scratch blocks counts, too."""

    def note(self: Any, trunk: Any, start: int, tokens: Sequence[int]) -> None:
        known = self._known[trunk.request_id]
        if start == known.tail_start + len(known.tail):
            known.tail += tokens

    patch.setattr(HostedModel, "_note_tail", note)


@pytest.mark.parametrize(
    "mutate", [no_copy, no_forgetting, no_invalidation, no_truncation, tail_of_scratch]
)
def test_rows_are_wrong_without(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert any(TwoModels(seed).run(50).wrong for seed in range(8))


def one_request(tokens: Sequence[int], blocks: Sequence[int]) -> tuple[BatchRow, RequestStep]:
    ids = np.array(tokens, np.int32)
    row = BatchRow("a", np.array(blocks, np.int32), ids, False)
    return row, RequestStep("a", ids, 1, tokens[-1:], 4)


def test_a_branch_without_room_dies_and_the_others_live() -> None:
    toy = ToyModel(1, BLOCKS + 2, BLOCK)
    model = hosted(toy, scratch=2)
    row, request = one_request([1, 2, 3, 4, 5, 6], [1, 2])
    model.begin_step([row])
    (trunk,) = model.sync([request], [0])
    assert trunk is not None
    twins = model.fork([trunk, trunk, trunk])
    assert [twin is None for twin in twins] == [False, False, True]
    assert twins[0] is not None
    model.extend([twins[0], trunk], [[7, 8, 9], [7]])  # the first one would need a third block
    assert not twins[0].alive
    assert trunk.alive
    with pytest.raises(ValueError, match="found no room"):
        model.logits([twins[0]])
    expected = toy.dense([1, 2, 3, 4, 5, 6, 7])[-1]
    assert np.allclose(model.logits([trunk])[0].numpy(), expected, atol=1e-5)
    model.end_step(True)
    assert not trunk.alive
    assert model.scratch.take(2) is not None  # all free again


def test_a_branch_never_gets_longer_than_the_model_can_read() -> None:
    toy = ToyModel(1, BLOCKS + SCRATCH, BLOCK)
    model = hosted(toy, max_model_len=8)
    row, request = one_request(list(range(7)), [1, 2])
    model.begin_step([row])
    (trunk,) = model.sync([request], [0])
    assert trunk is not None
    model.extend([trunk], [[7]])
    assert trunk.alive
    model.extend([trunk], [[8]])
    assert not trunk.alive
    model.end_step(True)
    row, request = one_request(list(range(9)), [1, 2, 3])
    model.begin_step([row])
    assert model.sync([request], [0]) == [None]


def test_vocabularies_of_other_sizes() -> None:
    toy = ToyModel(1, BLOCKS + SCRATCH, BLOCK)
    for size in (VOCAB + 5, VOCAB - 5):
        model = hosted(toy, vocab=size)
        row, request = one_request([1, VOCAB + 3, 2], [1])
        model.begin_step([row])
        (trunk,) = model.sync([request], [0])
        assert trunk is not None
        found = model.logits([trunk])[0].numpy()
        expected = toy.dense([1, VOCAB - 1, 2])[-1]  # an unknown id is read as the last one
        assert found.shape == (size,)
        assert np.allclose(found[:VOCAB], expected[:size], atol=1e-5)
        assert (found[VOCAB:] == -np.inf).all()


def test_unread_prompts_are_read_along_while_it_drafts() -> None:
    toy = ToyModel(1, BLOCKS + SCRATCH, BLOCK)
    model = hosted(toy)
    ids = np.arange(8, dtype=np.int32)
    chunk = BatchRow("a", np.array([1, 2], np.int32), ids, True)
    model.begin_step([chunk])
    model.end_step(could_draft=False)  # nothing to draft, but it might
    assert model.counts.rows == 8
    model.begin_step([])
    model.end_step(could_draft=True)  # it could, and did not
    chunk = BatchRow("b", np.array([3, 4], np.int32), ids, True)
    model.begin_step([chunk])
    model.end_step(could_draft=False)
    assert model.counts.rows == 8


def test_shared_blocks_are_read_once() -> None:
    toy = ToyModel(1, BLOCKS + SCRATCH, BLOCK)
    model = hosted(toy)
    tokens = np.arange(10, dtype=np.int32)
    rows = [
        BatchRow(name, np.array([1, 2, last], np.int32), tokens, False)
        for name, last in (("a", 3), ("b", 4))
    ]
    model.begin_step(rows)
    requests = [RequestStep(row.request_id, tokens, 1, [9], 4) for row in rows]
    trunks = model.sync(requests, [0, 1])
    assert model.counts.rows == 10 + 2
    expected = toy.dense(tokens.tolist())[-1]
    for trunk in trunks:
        assert trunk is not None
        assert np.allclose(model.logits([trunk])[0].numpy(), expected, atol=1e-5)


def test_a_failed_pass_leaves_nothing_marked() -> None:
    toy = ToyModel(1, BLOCKS + SCRATCH, BLOCK)
    model = hosted(toy)
    row, request = one_request(list(range(9)), [1, 2, 3])
    model.begin_step([row])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "forward", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.sync([request], [0])
    (trunk,) = model.sync([request], [0])
    assert trunk is not None
    expected = toy.dense(list(range(9)))[-1]
    assert np.allclose(model.logits([trunk])[0].numpy(), expected, atol=1e-5)


def test_branches_end_with_their_step() -> None:
    toy = ToyModel(1, BLOCKS + SCRATCH, BLOCK)
    model = hosted(toy)
    row, request = one_request([1, 2, 3], [1])
    model.begin_step([row])
    (trunk,) = model.sync([request], [0])
    assert trunk is not None
    (twin,) = model.fork([trunk])
    assert twin is not None
    model.end_step(True)
    assert not trunk.alive
    assert not twin.alive
    num_rows = model.counts.rows
    model.extend([trunk, twin], [[4], [4]])
    assert model.fork([trunk, twin]) == [None, None]
    assert model.counts.rows == num_rows


def test_other_weights_forget_all_kv() -> None:
    toy, other = ToyModel(1, BLOCKS + SCRATCH, BLOCK), ToyModel(5)
    model = hosted(toy)
    row, request = one_request(list(range(9)), [1, 2, 3])
    model.begin_step([row])
    model.sync([request], [0])
    model.end_step(True)
    names = ("embedding", "query", "key", "value", "head")
    model.begin_step([row])
    (trunk,) = model.sync([request], [0])
    assert trunk is not None
    model.reload((name, torch.from_numpy(getattr(other, name))) for name in names)
    model.extend([trunk], [[3]])  # in mid-step: what it reads now counts for nothing
    model.end_step(True)
    model.begin_step([row])
    (trunk,) = model.sync([request], [0])
    assert trunk is not None
    expected = other.dense(list(range(9)))[-1]
    assert np.allclose(model.logits([trunk])[0].numpy(), expected, atol=1e-5)


def test_rewinding_too_far_is_refused() -> None:
    toy = ToyModel(1, BLOCKS + SCRATCH, BLOCK)
    model = hosted(toy)
    row, request = one_request([1, 2, 3], [1])
    model.begin_step([row])
    (trunk,) = model.sync([request], [0])
    assert trunk is not None
    model.extend([trunk], [[4]])
    (twin,) = model.fork([trunk])
    assert twin is not None
    for branch, length in ((trunk, 2), (trunk, 5), (twin, 3)):
        with pytest.raises(ValueError, match="cannot rewind a branch"):
            model.rewind(branch, length)


def test_requests_that_a_model_cannot_follow() -> None:
    toy = ToyModel(1, BLOCKS + SCRATCH, BLOCK)
    model = hosted(toy)
    row, request = one_request([1, 2, 3], [1])
    model.begin_step([BatchRow("a", row.blocks, row.tokens, False, num_ids=0)])
    assert model.sync([request], [0]) == [None]
    model.begin_step([])
    assert model.sync([request], [0]) == [None]
    assert model.counts.forwards == 0


def test_scratch_gives_all_or_nothing() -> None:
    scratch = Scratch(range(3))
    assert scratch.take(2) == [0, 1]
    assert scratch.take(2) is None
    assert scratch.take(1) == [2]
    scratch.free_all()
    assert scratch.take(3) == [0, 1, 2]


def test_a_slow_first_pass_says_nothing() -> None:
    """It compiles a kernel, or finds no buffers; who believed it would never run a second one."""
    times = ForwardTimes()
    times.observe(1, 0.5)
    assert times.estimate(1) is None
    times.observe(1, 0.004)
    assert times.estimate(1) == pytest.approx(0.004)
    times.observe(3, 0.06)  # the first of this size
    assert times.estimate(3) == pytest.approx(0.012)
    times.observe(3, 0.005)
    assert times.estimate(3) == pytest.approx(0.005)


def test_times_grow_with_rows() -> None:
    times = ForwardTimes()
    assert times.estimate(1) is None
    for _ in range(60):
        times.observe(1, 0.010)
        times.observe(8, 0.017)
    times.observe(8, 5.0)  # another program had the processor
    one, four, eight, sixteen = (times.estimate(n) for n in (1, 4, 8, 16))
    assert one is not None
    assert four is not None
    assert eight is not None
    assert sixteen is not None
    assert one == pytest.approx(0.010, rel=0.01)
    assert one < four < eight == pytest.approx(0.017, rel=0.4)
    assert sixteen == pytest.approx(eight + (eight - one) * 8 / 7)
    assert times.estimate(32) is None


def test_a_jump_in_rows_is_tried() -> None:
    """A pass that is bound by weights takes as long: ten times as long would never be run."""
    times = ForwardTimes()
    for rows in (1, 2, 3, 5):
        for _ in range(3):
            times.observe(rows, 0.001)
    assert times.estimate(15) == pytest.approx(0.001)
    assert times.estimate(64) is None
    for _ in range(2):
        times.observe(64, 0.0012)
    assert times.estimate(64) == pytest.approx(0.0012)
    alone = ForwardTimes()
    for _ in range(2):
        alone.observe(1, 0.001)
    assert alone.estimate(3) == pytest.approx(0.003)
