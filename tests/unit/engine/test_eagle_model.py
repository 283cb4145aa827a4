# SPDX-License-Identifier: Apache-2.0
"""The books of EAGLE-3 heads against dense computation, on a toy of paged attention.

The toy's prefix cache hashes a block with the token behind it. vLLM's does not: there the last
position of a block may have been read with another request's next token, which a test of exactness
has to leave out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paged_toy import VOCAB, ToyHead, ToyStep
from toy_simulation import BLOCK, BLOCKS, SCRATCH, Drafts, Floats, Simulation

from vllm_spec_ext.engine.models.eagle_model import EagleModel
from vllm_spec_ext.engine.models.hosted_model import BatchRow, HostedModel
from vllm_spec_ext.engine.models.target_states import layers_by_model, pick, state_rows
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.errors import UnsupportedError
from vllm_spec_ext.proposers.cascade.reviewer import HostedReviewer
from vllm_spec_ext.proposers.models import Branch
from vllm_spec_ext.proposers.records import RequestStep
from vllm_spec_ext.scorers.walk.tree import Walk


def head_model(toy: Any, scratch: int = SCRATCH, max_model_len: int = 64) -> EagleModel:
    model = EagleModel(
        "toy",
        toy,
        num_ids=VOCAB,
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        max_rows=40,
    )
    model.bind(BLOCKS, BLOCK, range(BLOCKS, BLOCKS + scratch))
    return model


class OneHead(Simulation):
    """A head drafts alone; nobody may be refused, whatever steps draft nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, ahead=1, sessions=0.0)
        self.toy = ToyHead(1, BLOCKS + SCRATCH, BLOCK)
        self.model = head_model(self.toy)
        self.models = [self.model]
        self.refused = 0

    def begin_step(self, step: ToyStep) -> None:
        self.toy.begin_step(step)

    def truth(self, tokens: Sequence[int]) -> int:
        """The target agrees with the head three times in four."""
        if hash(tuple(tokens)) % 4 and len(tokens) > 1:
            return int(self.toy.dense_with(tokens, len(tokens))[-1].argmax())
        return hash(tuple(tokens)) % VOCAB

    def drafts(self, requests: Sequence[RequestStep]) -> Drafts:
        rows = [row for row in range(len(requests)) if self.rng.random() < 0.9]
        if self.rng.random() < 0.2:
            self.model.sync(requests, rows[:1])  # twice in a step
        found, refused = self.draft_with(self.model, requests, rows)
        self.refused += len(refused)
        return found

    def dense(self, model: HostedModel, text: Sequence[int], num_certain: int) -> Floats:
        return self.toy.dense_with(text, num_certain)

    def check_length(self, branch: Branch, text: Sequence[int]) -> None:
        """The first token is never read."""
        assert branch.length == len(text) - 1


@pytest.mark.parametrize("seed", range(3))
def test_every_row_equals_a_dense_computation(seed: int) -> None:
    simulation = OneHead(seed)
    simulation.run(100)
    assert simulation.wrong == 0
    assert simulation.rows > 1000
    assert simulation.refused == 0  # nobody has a gap, whatever steps draft nothing
    assert simulation.scheduler.num_hits > 20
    assert simulation.scheduler.num_preempted > 2
    assert simulation.model.scratch.most_used > 3


def no_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ToyHead, "copy_blocks", lambda self, pairs: None)


def tails_count(patch: pytest.MonkeyPatch) -> None:
    """As for models of their own: drafted tokens that were accepted are not read again."""

    def note(self: Any, trunk: Any, start: int, tokens: Sequence[int]) -> None:
        known = self._known[trunk.request_id]
        if start == trunk.floor:
            known.tail_start, known.tail = start, []
        HostedModel._note_tail(self, trunk, start, tokens)

    patch.setattr(EagleModel, "_note_tail", note)


def only_when_drafting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EagleModel, "end_step", HostedModel.end_step)


def no_shift(patch: pytest.MonkeyPatch) -> None:
    """States of the position that the token stands on, as far as there are any."""
    part = EagleModel._row_part

    def row_part(self: EagleModel, row: BatchRow, index: int | None) -> Any:
        found = part(self, row, index)
        if found is not None and len(found.tokens) > 1:
            assert found.states is not None
            found.states[:-1] = found.states[1:]
        return found

    patch.setattr(EagleModel, "_row_part", row_part)


@pytest.mark.parametrize("mutate", [no_copy, tails_count, only_when_drafting, no_shift])
def test_rows_are_wrong_or_missing_without(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    simulation = OneHead(1)
    simulation.run(100)
    assert simulation.wrong + simulation.refused > 0


def request_step(tokens: list[int], name: str = "a") -> RequestStep:
    return RequestStep(name, np.array(tokens, np.int32), 1, tokens[-1:], 4)


def batch_row(tokens: list[int], computed: int, blocks: list[int], name: str = "a") -> BatchRow:
    """A request whose last token is the bonus of a step."""
    num_read = len(tokens) - 1
    return BatchRow(
        name,
        np.array(blocks, np.int32),
        np.array(tokens, np.int32),
        False,
        computed=computed,
        following=np.array(tokens[1:], np.int32),
        state_rows=np.arange(num_read - computed),
    )


def test_a_request_with_a_gap_gets_no_drafts_and_others_do() -> None:
    """A block that came from elsewhere: the target has its KV, and nobody has the states."""
    toy = ToyHead(1, BLOCKS + SCRATCH, BLOCK)
    model = head_model(toy)
    tokens = [1, 2, 3, 4, 5, 6]
    toy.target_rows = {row: np.zeros(6) for row in range(9)}
    model.begin_step([batch_row(tokens, BLOCK, [3, 4])])
    assert model.sync([request_step(tokens)], [0]) == [None]
    model.end_step(True)
    assert model.counts.forwards == 0
    toy.outputs = []
    model.forget(["a"])
    model.begin_step([batch_row(tokens, 0, [5, 6])])
    (trunk,) = model.sync([request_step(tokens)], [0])
    assert trunk is not None
    assert trunk.length == 5
    model.end_step(True)
    assert not trunk.alive


def test_a_failed_pass_costs_what_it_was_to_read_and_no_more() -> None:
    """The states of it are gone; what was read before is still there, for others, too."""
    toy = ToyHead(1, BLOCKS + SCRATCH, BLOCK)
    model = head_model(toy)
    toy.target_rows = {row: np.zeros(6) for row in range(9)}
    shared = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    model.begin_step([batch_row(shared, 0, [3, 4, 5])])
    assert model.sync([request_step(shared)], [0]) != [None]
    model.end_step(True)
    toy.outputs = []
    model.begin_step([batch_row([*shared, 1], 8, [3, 4, 5])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "forward", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            model.sync([request_step([*shared, 1])], [0])
    assert "get no drafts" in caught.value.__notes__[0]
    model.end_step(True)
    goes_on, begins_alike = [*shared, 1, 2], [*shared[:8], 3, 4]
    model.begin_step([batch_row(goes_on, 9, [3, 4, 5]), batch_row(begins_alike, 8, [3, 4, 6], "b")])
    found = model.sync([request_step(goes_on), request_step(begins_alike, "b")], [0, 1])
    assert found[0] is None
    assert found[1] is not None


def test_what_stands_in_front_of_a_picture_is_read_for_others() -> None:
    """vLLM's prefix cache gives it to prompts without one, whose states nobody has any more."""
    toy = ToyHead(1, BLOCKS + SCRATCH, BLOCK)
    model = head_model(toy)
    toy.target_rows = {row: np.zeros(6) for row in range(9)}
    shown, text = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9]
    model.begin_step([replace(batch_row(shown, 0, [3, 4, 5], "p"), num_ids=6)])
    assert model.sync([request_step(shown, "p")], [0]) == [None]
    model.end_step(True)
    toy.outputs = []
    model.begin_step([batch_row(text, BLOCK, [3, 7])])
    assert model.sync([request_step(text)], [0]) != [None]
    model.end_step(True)
    # Not what is read with the picture's first token, which stands at place 6.
    model.forget(["p"])
    assert model.blocks.leading(np.array([3, 4, 5], np.int32), 9, 0) == 5


def test_blocks_that_are_hit_in_the_step_that_fills_them() -> None:
    """Whatever the order of the batch: who has computed less is read first."""
    toy = ToyHead(1, BLOCKS + SCRATCH, BLOCK)
    model = head_model(toy)
    toy.target_rows = {row: np.zeros(6) for row in range(9)}
    first, second = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9]
    for rows in (
        [batch_row(second, BLOCK, [3, 5], "b"), batch_row(first, 0, [3, 4])],
        [batch_row(first, 0, [6, 7]), batch_row(second, BLOCK, [6, 8], "b")],
    ):
        model.begin_step(rows)
        trunks = model.sync([request_step(second, "b"), request_step(first)], [0, 1])
        assert None not in trunks
        model.end_step(True)
        model.forget(["a", "b"])
        toy.outputs = []


def test_other_weights_keep_what_was_read() -> None:
    toy = ToyHead(1, BLOCKS + SCRATCH, BLOCK)
    model = head_model(toy)
    toy.target_rows = {row: np.zeros(6) for row in range(9)}
    tokens = [1, 2, 3, 4, 5, 6]
    model.begin_step([batch_row(tokens, 0, [5, 6])])
    model.end_step(False)
    model.reload([])
    toy.outputs = []
    model.begin_step([batch_row([*tokens, 7], 5, [5, 6])])
    assert model.sync([request_step([*tokens, 7])], [0]) != [None]


def test_branches_die_without_room_and_rewinds_keep_their_outputs() -> None:
    toy = ToyHead(1, BLOCKS + 1, BLOCK)
    model = head_model(toy, scratch=1)
    tokens = [1, 2, 3, 4, 5]
    toy.target_rows = {row: np.ones(6) for row in range(9)}
    model.begin_step([batch_row(tokens, 0, [5])])
    (trunk,) = model.sync([request_step(tokens)], [0])
    assert trunk is not None
    model.extend([trunk], [[7, 8, 9]])
    expected = model.all_logits(trunk)
    model.rewind(trunk, trunk.length - 2)
    assert torch.equal(model.logits([trunk])[0], expected[1])
    model.extend([trunk], [[8]])
    assert torch.allclose(model.logits([trunk])[0], expected[2])
    model.extend([trunk], [[9, 10, 11, 12]])  # the fifth token behind the only scratch block
    assert not trunk.alive
    with pytest.raises(ValueError, match="found no room"):
        model.logits([trunk])
    (again,) = model.sync([request_step(tokens)], [0])
    assert again is not None
    with pytest.raises(ValueError, match="at least one token"):
        model.extend([again], [[]])


def test_as_a_level_it_is_taken_back_to_what_stands() -> None:
    """Its trunk has one token fewer than the request."""
    toy = ToyHead(1, BLOCKS + 2, BLOCK)
    model = head_model(toy, scratch=2)
    tokens = [1, 2, 3, 4, 5]
    toy.target_rows = {row: np.ones(6) for row in range(9)}
    model.begin_step([batch_row(tokens, 0, [5, 6])])
    asked = request_step([9, *tokens])
    found: list[torch.Tensor | None] = []
    for first, kept, more in (([5, 7, 8], 2, [10]), ([5, 7], 2, [10])):
        review = HostedReviewer(model).begin([asked], [0], [6])
        review.run([first])
        review.keep([kept])
        found += review.run([more])
    taken_back, straight = found
    assert taken_back is not None
    assert straight is not None
    assert torch.allclose(taken_back, straight)


def test_rows_of_the_target_whose_tokens_are_certain() -> None:
    """A prompt's chunk, a chain of which two are accepted, a tree, a step without a draft."""
    step = Step(
        ("a", "b", "c", "d"),
        [[], [5, 6, 7], [5, 6, 7, 8], []],
        [4, 4, 5, 1],
    )
    new_tokens: list[list[int]] = [[], [5, 6, 9], [7, 8, 1], [3]]
    chains = state_rows(step, [0, 4, 8, 13], new_tokens)
    assert [rows.tolist() for rows in chains] == [[0, 1, 2, 3], [4, 5, 6], [8, 9, 10], [13]]
    accepted = np.array([[-1, -1], [0, 1], [1, 3], [-1, -1]])
    step.walk = Walk(accepted, np.full((4, 3), -1), np.array([0, 2, 2, 0]))
    trees = state_rows(step, [0, 4, 8, 13], new_tokens)
    assert [rows.tolist() for rows in trees] == [[0, 1, 2, 3], [4, 5, 6], [8, 10, 12], [13]]


def draft(num_states: int, layers: tuple[int, ...] | None) -> Any:
    from vllm_spec_ext.engine.models.eagle_checkpoint import Eagle3Facts

    facts = Eagle3Facts(num_states, layers, 8, 8, 16)
    return SimpleNamespace(name="head", reads=facts, model_config=SimpleNamespace(model="x"))


def test_layers_that_heads_read() -> None:
    found = layers_by_model([draft(3, None), draft(2, (9, 4)), draft(0, None)], (2, 8, 13))
    assert found == [(2, 8, 13), (4, 9), ()]
    with pytest.raises(UnsupportedError, match=r"found 2 layers of the target, \[1, 2\].*3 diff"):
        layers_by_model([draft(3, None)], (2, 2, 1))
    final, *rest = [torch.full((1, 1), float(i)) for i in range(4)]
    assert pick(final, rest, (2, 4, 9), (4, 9)) == rest[1:]
    assert pick(final, None, (), ()) == [final]
