# SPDX-License-Identifier: Apache-2.0
"""Replay gives every method the requests it expects."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from vllm_spec_ext.cli import simulate
from vllm_spec_ext.engine.watching.step_log import StepLog
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import (
    BaseProposer,
    Draft,
    EngineHandle,
    NextTokens,
    StepContext,
    StepOutcome,
    chain,
    proposer,
)
from vllm_spec_ext.replay import Recording, recording_of, replay


def test_input_copy_can_be_replayed() -> None:
    """Its requests have options of their own class."""
    text = list(range(20, 60))
    recordings = [Recording([1, 2, *text, 3], [*text[:30], 9])]
    (point,) = simulate.make_points("input_copy", [{"source": "prompt", "fold_case": False}])
    proposer, engine = simulate.start("input_copy", point, recordings, None, "", 1)
    result = replay(proposer, recordings, engine)
    assert result.num_tokens == 30
    assert result.num_steps < 10
    assert result.accepted_at_depth[0] > 0


def rows_of(likeliest: dict[int, int], tokens: list[int]) -> NextTokens:
    """Rows that end with these tokens, each with the one token that follows it for sure."""
    contexts = np.array([[-1, one] for one in tokens], np.int32)
    return NextTokens(
        contexts,
        np.array([[likeliest[one], *[0] * 7] for one in tokens], np.int32),
        np.array([[0.9, *[0.01] * 7] for _ in tokens], np.float32),
    )


def test_what_the_target_foresaw_is_replayed_for_the_rows_that_are_verified() -> None:
    """The proposer is given the rows of its own draft, each at its place in the text."""
    log = StepLog()
    likeliest = {3: 4, 4: 5, 5: 6, 9: 3}
    log.verified("r", [], [], [4], rows_of(likeliest, [3]))  # the prefill
    draft = Draft(np.array([5, 9], np.int32), np.array([-1, -1], np.int32))
    log.drafted("r", [5, 9], [-1, -1], draft)
    log.verified("r", [5, 9], [0], [5, 6], rows_of(likeliest, [4, 5, 9]))
    log.verified("r", [], [], [7])
    recording = recording_of([1, 3], [4, 5, 6, 7], list(log.steps))
    assert sorted(recording.foreseen) == [(2,), (3,), (3, 9), (4,)]
    assert recording.foreseen[3, 9][0][0] == 3


def test_rows_that_look_alike_are_told_apart() -> None:
    """Nodes of one depth under the same two tokens, but on other paths."""
    log = StepLog()
    tokens, parents = [8, 9, 1, 1, 2, 2], [-1, -1, 0, 1, 2, 3]
    log.drafted("r", tokens, parents, Draft(np.array(tokens), np.array(parents)))
    rows = NextTokens(
        np.array([[-1, 3], [3, 8], [3, 9], [8, 1], [9, 1], [1, 2], [1, 2]], np.int32),
        np.arange(7, dtype=np.int32)[:, None],
        np.ones((7, 1), np.float32),
    )
    log.verified("r", tokens, [], [7], rows)
    recording = recording_of([3], [7], list(log.steps))
    found = {row: tokens for row, ((*tokens,), _) in recording.foreseen.items()}
    assert (found[1, 8, 1, 2], found[1, 9, 1, 2]) == ([5], [6])


@proposer("guesses", summary="One token.")
class Guesses(BaseProposer):
    """Drafts one token, and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__(MethodOptions())
        self.told: list[NextTokens | None] = []
        self.texts: list[list[int]] = []
        self.rooms: list[int] = []
        self.outcomes: list[StepOutcome] = []

    def propose(self, step: StepContext) -> list[Draft]:
        (request,) = step.requests
        self.told.append(request.next_tokens)
        self.texts.append(request.token_ids.tolist())
        self.rooms.append(request.room)
        return [chain([5][: request.room])]

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        self.outcomes += outcomes


def test_rows_of_the_draft_are_told_in_the_step_that_verifies_it() -> None:
    foreseen = {
        (2,): ([4], [0.9]),
        (3,): ([5], [0.8]),
        (4,): ([6], [0.7]),
        (3, 9, 9): ([0], [0.6]),  # a row that nothing of this replay verifies
    }
    guesses = Guesses()
    engine = EngineHandle(10, 64, 1, 4, "none", lambda: None)
    result = replay(guesses, [Recording([1, 3], [4, 5, 6, 7], foreseen=foreseen)], engine)
    assert result.num_steps == 2
    first, second, third = guesses.told
    assert first is not None
    assert (first.contexts.tolist(), first.tokens.tolist()) == ([[1, 3]], [[4]])
    assert second is not None
    assert second.contexts.tolist() == [[3, 4], [4, 5]]
    np.testing.assert_allclose(second.probs, [[0.8], [0.7]])
    assert third is None


def test_the_end_of_a_request_is_read_as_an_engine_reads_it() -> None:
    """Its last step has no room, but its tokens and its last outcome are told."""
    guesses = Guesses()
    engine = EngineHandle(10, 64, 1, 4, "none", lambda: None)
    result = replay(guesses, [Recording([1, 3], [4, 5, 6, 7])], engine)
    assert guesses.texts[-1] == [1, 3, 4, 5, 6, 7]
    assert guesses.rooms == [2, 0, 0]
    assert [one.num_accepted for one in guesses.outcomes] == [1, 0]
    assert (result.num_steps, result.num_tokens, result.num_drafted) == (2, 3, 1)


def test_an_answer_that_ended_by_itself_had_room_for_longer_drafts() -> None:
    guesses = Guesses()
    engine = EngineHandle(10, 64, 1, 4, "none", lambda: None)
    replay(guesses, [Recording([1, 3], [4, 5, 6, 7], max_tokens=6)], engine)
    assert guesses.rooms == [4, 2, 1]


def test_recordings_with_what_was_foreseen_are_read_from_files(tmp_path: Path) -> None:
    row = {
        "prompt_token_ids": [1, 3],
        "output_token_ids": [4, 5],
        "foreseen": [[2, [], [4, 7], [0.9, 0.1]], [2, [6, 1], [4, 7], [0.8, 0.1]]],
    }
    path = tmp_path / "recorded.jsonl"
    path.write_text(json.dumps(row))
    (found,) = simulate.read_recordings(path, None)
    assert found.foreseen == {(2,): ([4, 7], [0.9, 0.1]), (2, 6, 1): ([4, 7], [0.8, 0.1])}
    assert simulate._vocab_size([found], None) == 8  # of the tokens that were foreseen
    (point,) = simulate.make_points("recycling", [{}])
    with pytest.raises(SpecExtError, match=r"found 2 next tokens in a row, recycling needs 8"):
        simulate.start("recycling", point, [found], None, "", 1)
    for wrong in (
        [[2, [4], [0.9]]],
        [[2, ["x"], [4], [0.9]]],
        [[2, [], [4], [0.9]], [3, [], [4, 7], [0.9, 0.1]]],
    ):
        path.write_text(json.dumps({**row, "foreseen": wrong}))
        with pytest.raises(SpecExtError, match="foreseen: expected"):
            simulate.read_recordings(path, None)


def test_stop_tokens_of_a_recording(tmp_path: Path) -> None:
    class Tokenizer:
        eos_token_id = 2

    row = {"prompt_token_ids": [1, 3], "output_token_ids": [4, 5], "stop_token_ids": [7, 8]}
    path = tmp_path / "recorded.jsonl"
    path.write_text(json.dumps(row))
    assert simulate.read_recordings(path, Tokenizer())[0].ends == {7, 8}
    path.write_text(json.dumps({**row, "stop_token_ids": [-1]}))
    with pytest.raises(SpecExtError, match=r"line 1: stop_token_ids must be a list of integers"):
        simulate.read_recordings(path, None)
    del row["stop_token_ids"]
    path.write_text(json.dumps(row))
    assert simulate.read_recordings(path, Tokenizer())[0].ends == {2}
    assert simulate.read_recordings(path, None)[0].ends == frozenset()


def test_nothing_counts_as_drafted_behind_a_stop_token() -> None:
    text = list(range(20, 40))
    recordings = [
        Recording([1, *text, 2, 3, 4, 5], [*text, 2], ends=frozenset(ends)) for ends in ((), (2,))
    ]
    (point,) = simulate.make_points("input_copy", [{"source": "prompt", "fold_case": False}])
    found = []
    for recording in recordings:
        given = [Recording(**{**vars(recording), "max_tokens": 40})]
        proposer, engine = simulate.start("input_copy", point, given, None, "", 1)
        found.append(replay(proposer, given, engine))
    assert found[0].num_steps == found[1].num_steps
    assert found[0].num_drafted == found[1].num_drafted + 3


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_recordings_that_python_cannot_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(SpecExtError, match="line 1: not JSON"):
        simulate.read_recordings(path, None)
