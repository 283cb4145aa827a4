# SPDX-License-Identifier: Apache-2.0
"""The books of block drafters against dense computation, on a toy of paged attention."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from paged_toy import VOCAB, ToyBlocks, ToyRequest, ToyScheduler
from toy_simulation import BLOCK, BLOCKS, PREFIXES, SCRATCH, update

from vllm_spec_ext.engine.models import block_model as module
from vllm_spec_ext.engine.models.block_model import BlockModel, BlockSettings
from vllm_spec_ext.engine.models.block_pass import BlockPass, ContextRows
from vllm_spec_ext.engine.models.branches import Scratch
from vllm_spec_ext.engine.models.filled_blocks import FilledBlocks
from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.proposers.models import BlockFacts, BlockWeights, SlotCandidates, SlotHint
from vllm_spec_ext.proposers.records import RequestStep

MASK, SLOTS, MAX_LEN = VOCAB - 1, 5, 32


def block_model(toy: Any, scratch: int = SCRATCH) -> BlockModel:
    settings = BlockSettings(BlockFacts(SLOTS), MASK, False, VOCAB)
    model = BlockModel("toy", toy, settings, MAX_LEN, may_wait=True)
    model.bind(BLOCKS, BLOCK, range(BLOCKS, BLOCKS + scratch))
    return model


@dataclass
class Simulation:
    """Requests come and go while a random proposer drafts blocks; counts wrong slots."""

    seed: int
    skip: float = 0.3  # of the steps, in which nothing is drafted
    slots: int = 0
    wrong: int = 0
    refused: int = 0
    too_long: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.toy = ToyBlocks(1, BLOCKS + SCRATCH, BLOCK)
        self.model = block_model(self.toy)
        self.scheduler = ToyScheduler(BLOCKS, BLOCK, 24, self.rng)

    def run(self, num_steps: int) -> "Simulation":
        for number in range(num_steps):
            while len(self.scheduler.waiting) < 2:
                prompt = list(self.rng.choice(PREFIXES))[: self.rng.randint(5, 20)]
                prompt += [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 6))]
                name = f"{number}-{len(self.scheduler.waiting)}"
                self.scheduler.waiting.append(
                    ToyRequest(name, prompt, len(prompt), self.rng.randint(2, 25))
                )
            self.step()
        return self

    def step(self) -> None:
        step = self.scheduler.step(self.truth)
        self.toy.begin_step(step)
        update(self.model, step.events)
        self.model.begin_step(step.rows)
        requests = [
            RequestStep(
                r.name,
                np.array(r.tokens, np.int32),
                r.num_prompt,
                r.tokens[-n:],
                self.rng.randint(1, 8),
            )
            for r, n in zip(step.decoded, step.new_tokens, strict=True)
        ]
        if self.rng.random() >= self.skip:
            for index, tokens in self.draft(requests).items():
                step.decoded[index].draft = tokens
        self.model.end_step(bool(requests))
        ended = type(step.events)()
        self.scheduler.end(ended)
        update(self.model, ended)

    def truth(self, tokens: Sequence[int]) -> int:
        """Now and then what the drafter would say."""
        if len(tokens) > 1 and hash(tuple(tokens)) % 3 == 0:
            ids = [tokens[-1], *[MASK] * SLOTS]
            zeros = np.zeros(len(ids), np.int64)
            return int(self.toy.dense_block(tokens, ids, zeros, zeros)[1].argmax())
        return hash(tuple(tokens)) % VOCAB

    def draft(self, requests: Sequence[RequestStep]) -> dict[int, list[int]]:
        rows = [row for row in range(len(requests)) if self.rng.random() < 0.9]
        hints = [self.hint() for _ in rows]
        asked = self.rng.randint(1, SLOTS + 2)
        found = self.model.predict(requests, rows, asked, VOCAB, hints)
        drafts = {}
        for row, hint, one in zip(rows, hints, found, strict=True):
            text = requests[row].token_ids.tolist()
            slots = min(asked, SLOTS, MAX_LEN - len(text))
            if one is None:
                self.too_long += slots < 1
                self.refused += slots >= 1
                continue
            assert len(one.tokens) == min(slots, requests[row].room)
            self.compare(text, slots, hint, one)
            drafts[row] = one.tokens[:, 0].tolist()
        return drafts

    def hint(self) -> SlotHint | None:
        if self.rng.random() < 0.5:
            return None
        size = self.rng.randint(1, SLOTS + 2)
        tokens = np.array([self.rng.randrange(VOCAB) for _ in range(size)], np.int32)
        return SlotHint(tokens, self.rng.randint(1, 3))

    def compare(
        self, text: list[int], slots: int, hint: SlotHint | None, found: SlotCandidates
    ) -> None:
        shown = np.zeros((2, 1 + slots), np.int64)
        if hint is not None:
            size = min(slots, len(hint.tokens))
            shown[:, 1 : 1 + size] = hint.tokens[:size], [hint.kind] * size
        dense = self.toy.dense_block(text, [text[-1], *[MASK] * slots], *shown)
        for slot, (tokens, (row,)) in enumerate(zip(found.tokens, found.log_probs, strict=True)):
            self.slots += 1
            self.wrong += not np.allclose(dense[1 + slot, tokens], row, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_every_slot_equals_a_dense_computation(seed: int) -> None:
    simulation = Simulation(seed).run(150)
    assert simulation.wrong == 0
    assert simulation.slots > 500
    assert simulation.refused == 0  # nobody has a gap, whatever steps draft nothing
    assert simulation.scheduler.num_hits > 20
    assert simulation.scheduler.num_preempted > 2
    assert simulation.scheduler.num_sessions > 2
    assert simulation.model.scratch.most_used > 1


def test_where_little_is_drafted_states_wait_and_nothing_is_missing() -> None:
    simulation = Simulation(0, skip=0.9).run(600)
    assert simulation.wrong == simulation.refused == 0
    assert simulation.slots > 100
    assert simulation.scheduler.num_hits > 20
    assert simulation.scheduler.num_preempted > 2


def drafts_stay(patch: pytest.MonkeyPatch) -> None:
    """Rows of a block count as context."""
    original = BlockModel._block

    def block(self: Any, request: RequestStep, *rest: Any) -> Any:
        made = original(self, request, *rest)
        if made is not None:
            row = self._rows[request.request_id]
            end = min(made.start + 2, len(row.blocks) * BLOCK)
            self.blocks.fill(row.blocks, made.start, end)
            self._known[request.request_id] = max(end, made.start)
        return made

    patch.setattr(BlockModel, "_block", block)


def steps_are_skipped(patch: pytest.MonkeyPatch) -> None:
    """The context is written in steps with drafts alone."""
    patch.setattr(
        BlockModel,
        "end_step",
        lambda self, could_draft: self.scratch.free_all(),
    )


def nothing_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockModel, "forget", lambda self, request_ids: None)


def blocks_keep_their_marks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FilledBlocks, "allocate", lambda self, blocks: None)
    patch.setattr(FilledBlocks, "enter", lambda self, blocks, num_computed: None)


def rows_see_what_is_before(patch: pytest.MonkeyPatch) -> None:
    original: Any = module.lay_out_blocks

    def causal(blocks: Any, size: int, num_ids: int, mask: int, number: int, _: bool) -> BlockPass:
        return original(blocks, size, num_ids, mask, number, True)

    patch.setattr(module, "lay_out_blocks", causal)


def scratch_is_shared(patch: pytest.MonkeyPatch) -> None:
    def take(self: Scratch, number: int) -> list[int]:
        self.most_used = number
        return self._blocks[:number]

    patch.setattr(Scratch, "take", take)


@pytest.mark.parametrize(
    "mutate",
    [
        drafts_stay,
        steps_are_skipped,
        nothing_is_forgotten,
        blocks_keep_their_marks,
        rows_see_what_is_before,
        scratch_is_shared,
    ],
)
def test_what_is_wrong_is_found_out(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    simulation = Simulation(1).run(100)
    assert simulation.wrong + simulation.refused > 0


def test_blocks_that_change_hands_before_what_waits_is_written_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BlockModel, "settle", lambda self: None)
    with pytest.raises(AssertionError, match="two tokens in one place"):
        Simulation(1, skip=0.6).run(300)


def request_step(tokens: list[int], name: str = "a", room: int = 9) -> RequestStep:
    return RequestStep(name, np.array(tokens, np.int32), 1, tokens[-1:], room)


def batch_row(tokens: list[int], computed: int, blocks: list[int], name: str = "a") -> BatchRow:
    """A request whose last token is the bonus of a step."""
    num_read = len(tokens) - 1
    return BatchRow(
        name,
        np.array(blocks, np.int32),
        np.array(tokens, np.int32),
        False,
        computed=computed,
        state_rows=np.arange(num_read - computed),
    )


def with_states(number: int = 9) -> ToyBlocks:
    toy = ToyBlocks(1, BLOCKS + SCRATCH, BLOCK)
    toy.target_rows = {row: np.full(6, float(row)) for row in range(number)}
    return toy


def test_a_request_with_a_gap_gets_no_drafts_and_others_do() -> None:
    """A block that came from elsewhere: the target has its KV, and nobody has the states."""
    model = block_model(with_states())
    tokens = [1, 2, 3, 4, 5, 6]
    model.begin_step([batch_row(tokens, BLOCK, [3, 4])])
    assert model.predict([request_step(tokens)], [0], 3, 1) == [None]
    model.end_step(True)
    assert model.counts.forwards == model.counts.rows == 0
    model.forget(["a"])
    model.begin_step([batch_row(tokens, 0, [5, 6])])
    assert model.predict([request_step(tokens)], [0], 3, 1) != [None]
    model.end_step(True)
    assert model.counts.forwards == 1
    assert model.counts.rows == 5 + 4


@pytest.mark.parametrize(("may_wait", "passes"), [(True, 3), (False, 20)])
def test_steps_without_drafts_share_a_pass(
    monkeypatch: pytest.MonkeyPatch, may_wait: bool, passes: int
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 7)
    toy = with_states()
    model = BlockModel(
        "toy", toy, BlockSettings(BlockFacts(SLOTS), MASK, False, VOCAB), 64, may_wait=may_wait
    )
    model.bind(BLOCKS, BLOCK, range(BLOCKS, BLOCKS + SCRATCH))
    tokens = [1, 2, 3]
    for computed in range(1, 21):
        model.begin_step([batch_row(tokens, computed - (computed == 1), [*range(3, 12)])])
        model.end_step(True)
        tokens.append(computed % VOCAB)
    model.settle()
    assert toy.num_written == passes
    assert model.counts.rows == 21
    model.settle()
    assert toy.num_written == passes


def test_an_exchange_leaves_the_books_and_what_waits() -> None:
    toy = with_states()
    model = block_model(toy)
    tokens = [1, 2, 3]
    for computed in (0, 2, 3):
        model.begin_step([batch_row(tokens, computed, [3, 4])])
        if computed == 3:
            head = torch.from_numpy(toy.head)
            model.exchange(BlockWeights({"head": head.flip(1)}, {}, None))
            (found,) = model.predict([request_step(tokens)], [0], 3, 1)
            model.exchange(BlockWeights({"head": head}, {}, None))
            (again,) = model.predict([request_step(tokens)], [0], 3, 1)
        model.end_step(True)
        tokens = [*tokens, computed]
    assert found is not None
    assert again is not None
    assert found.tokens.flatten().tolist() == [VOCAB - 1 - t for t in again.tokens.flatten()]
    assert model.counts.rows == 4 + 2 * 4  # the context once
    assert toy.num_written == 1


def test_blocks_that_are_hit_in_the_step_that_fills_them() -> None:
    """Whatever the order of the batch: who has computed less is written first."""
    model = block_model(with_states())
    first, second = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9]
    for rows in (
        [batch_row(second, BLOCK, [3, 5], "b"), batch_row(first, 0, [3, 4])],
        [batch_row(first, 0, [6, 7]), batch_row(second, BLOCK, [6, 8], "b")],
    ):
        model.begin_step(rows)
        found = model.predict([request_step(second, "b"), request_step(first)], [0, 1], 2, 1)
        assert None not in found
        model.end_step(True)
        model.forget(["a", "b"])


def test_what_stands_in_front_of_a_picture_is_written_for_others() -> None:
    """vLLM's prefix cache gives it to prompts without one, whose states nobody has any more."""
    toy = with_states()
    written: list[int] = []
    write = toy.write_context

    def recorded(plan: ContextRows, wait: bool = False) -> None:
        written.extend(plan.positions.tolist())
        write(plan, wait)

    toy.write_context = recorded  # type: ignore[method-assign]
    model = block_model(toy)
    shown, text = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9]
    model.begin_step([replace(batch_row(shown, 0, [3, 4, 5], "p"), num_ids=6)])
    assert model.predict([request_step(shown, "p")], [0], 2, 1) == [None]
    model.end_step(True)
    assert written == [*range(6)], "the rest serves nobody: what it shows is not drafted for"
    model.begin_step([batch_row(text, BLOCK, [3, 7])])
    assert model.predict([request_step(text)], [0], 2, 1) != [None]
    model.end_step(True)


def test_no_room_no_ids_no_position_no_draft() -> None:
    model = block_model(with_states(60), scratch=0)
    tokens = list(range(BLOCK))
    model.begin_step([batch_row(tokens, 0, [3])])
    assert model.predict([request_step(tokens)], [0], 2, 1) == [None]  # behind its only block
    assert model.predict([request_step(tokens, room=0)], [0], 2, 1) == [None]
    model.end_step(True)
    model = block_model(with_states(60))
    long = [1] * MAX_LEN
    blocks = list(range(MAX_LEN // BLOCK + 1))
    model.begin_step([batch_row(long, 0, blocks)])
    assert model.predict([request_step(long)], [0], 2, 1) == [None]
    model.end_step(True)
    model.begin_step([replace(batch_row(tokens, 0, [20, 21], "c"), num_ids=0)])
    assert model.predict([request_step(tokens, "c")], [0], 2, 1) == [None]


def test_a_context_that_could_not_be_written_is_not_trusted() -> None:
    toy = with_states()
    model = block_model(toy)
    tokens = [1, 2, 3]
    model.begin_step([batch_row(tokens, 0, [3])])
    toy.target_rows = {}
    with pytest.raises(KeyError):
        model.predict([request_step(tokens)], [0], 2, 1)
    model.end_step(True)
    toy.target_rows = {row: np.ones(6) for row in range(9)}
    model.begin_step([batch_row([*tokens, 4], 2, [3])])
    assert model.predict([request_step([*tokens, 4])], [0], 2, 1) == [None]


def test_a_failed_pass_costs_what_it_was_to_write_and_no_more() -> None:
    """The states of it are gone; what was written before is still there, for others, too."""
    toy = with_states()
    model = block_model(toy)
    shared = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    model.begin_step([batch_row(shared, 0, [3, 4, 5])])
    assert model.predict([request_step(shared)], [0], 2, 1) != [None]
    model.end_step(True)
    other = [*range(9, 0, -1)]
    model.begin_step([batch_row([*shared, 1], 8, [3, 4, 5]), batch_row(other, 0, [7, 8, 9], "b")])
    states, toy.target_rows = toy.target_rows, {}
    with pytest.raises(KeyError) as caught:
        model.predict([request_step(other, "b")], [0], 2, 1)
    assert "get no drafts" in caught.value.__notes__[0]
    model.end_step(True)
    toy.target_rows = states
    texts = {"a": [*shared, 1, 2], "b": [*other, 1], "c": [*shared[:8], 3, 4]}
    model.begin_step(
        [
            batch_row(texts["a"], 9, [3, 4, 5]),
            batch_row(texts["b"], 8, [7, 8, 9], "b"),
            batch_row(texts["c"], 8, [3, 4, 10], "c"),
        ]
    )
    requests = [request_step(text, name) for name, text in texts.items()]
    found = model.predict(requests, [0, 1, 2], 2, 1)
    assert [one is None for one in found] == [True, True, False]


def test_what_waited_for_a_failed_pass_is_not_trusted() -> None:
    toy = with_states()
    model = block_model(toy)
    tokens = [1, 2, 3]
    model.begin_step([batch_row(tokens, 0, [3])])
    model.end_step(True)  # waits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "write_context", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.settle()
        model.settle()  # nothing waits any more
    model.begin_step([batch_row([*tokens, 4], 2, [3])])
    assert model.predict([request_step([*tokens, 4])], [0], 2, 1) == [None]


def test_warming_up_touches_no_request_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = with_states(1)
    model = block_model(toy)
    keys = toy.keys.copy()
    sizes = []
    run_blocks = toy.run_blocks

    def watched(plan: BlockPass) -> Any:
        sizes.append(plan.rows.num_rows)
        return run_blocks(plan)

    monkeypatch.setattr(toy, "run_blocks", watched)
    model.warm_up()
    assert sizes == [2, 1 + SLOTS]
    assert np.array_equal(toy.keys[:, : BLOCKS * BLOCK], keys[:, : BLOCKS * BLOCK])
    assert model.counts.forwards == model.counts.rows == 0
    assert model.forward_seconds(4) is None  # compiling says nothing of a pass
    assert model.scratch.take(SCRATCH) is not None


def test_times_and_counts() -> None:
    model = block_model(with_states())
    tokens = [1, 2, 3]
    assert model.forward_seconds(4) is None
    for is_known in (False, True):  # one pass alone says nothing of the next
        model.begin_step([batch_row(tokens, 0, [3])])
        model.predict([request_step(tokens)], [0], 3, 1)
        model.end_step(True)
        assert (model.forward_seconds(4) is not None) == is_known
    seconds = model.forward_seconds(4)
    assert seconds is not None
    assert 0.0 < seconds <= model.counts.seconds
