# SPDX-License-Identifier: Apache-2.0
"""The timed loop, driven by a scripted engine and a clock that only the engine moves."""

from collections.abc import Sequence
from dataclasses import replace

from vllm_spec_ext.bench.measure import StepOutput, run_questions
from vllm_spec_ext.bench.prompts import Message, Question


class ScriptedEngine:
    """Gives each request the next chunk of its script, one chunk a step, one second a step."""

    def __init__(self, scripts: dict[str, list[list[int]]]) -> None:
        self.scripts = {name: list(chunks) for name, chunks in scripts.items()}
        self.now = 0.0
        self.active: list[str] = []
        self.prompts: dict[str, list[int]] = {}
        self.most_active = 0

    def add(self, request_id: str, token_ids: Sequence[int], seed: int) -> None:
        self.active.append(request_id)
        self.prompts[request_id] = list(token_ids)
        self.most_active = max(self.most_active, len(self.active))

    def step(self) -> list[StepOutput]:
        self.now += 1.0
        outputs = []
        for name in list(self.active):
            chunk = self.scripts[name].pop(0)
            finished = not self.scripts[name]
            if finished:
                self.active.remove(name)
            outputs.append(StepOutput(name, chunk, finished))
        return outputs

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return [len(message["content"]) for message in messages]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(str, token_ids))


def _question(category: str = "c", follow_ups: tuple[str, ...] = ()) -> Question:
    return Question(1, category, ({"role": "user", "content": "abc"},), follow_ups)


def test_steps_tokens_and_times_of_one_request() -> None:
    engine = ScriptedEngine({"0-0": [[1], [2, 3, 4], [5]]})
    seen: list[tuple[list[int], int]] = []
    (record,), wall_s = run_questions(
        engine,
        [(0, _question())],
        concurrency=1,
        clock=lambda: engine.now,
        on_step=lambda tokens, new: seen.append((list(tokens), new)),
    )
    (turn,) = record.turns
    assert turn.token_ids == (1, 2, 3, 4, 5)
    assert turn.step_sizes == (1, 3, 1)
    assert (turn.first_token_s, turn.wall_s, wall_s) == (1.0, 3.0, 3.0)
    assert seen == [([1], 1), ([1, 2, 3, 4], 3), ([1, 2, 3, 4, 5], 1)]


def test_steps_beside_another_ones_prefill_are_marked() -> None:
    scripts = {"0-0": [[1], [2]], "1-0": [[1], [2], [3], [4], [5]], "2-0": [[], [1], [2]]}
    engine = ScriptedEngine(scripts)
    records, _ = run_questions(
        engine, [(i, _question()) for i in range(3)], concurrency=2, clock=lambda: engine.now
    )
    turns = [record.turns[0] for record in records]
    # Request 2 comes for 0 after the second step, and its prefill takes two.
    assert [turn.stalled for turn in turns] == [(), (2, 3), ()]
    assert turns[1].decode_steps == [1, 4]
    assert turns[1].step_s == (1.0,) * 5
    assert turns[2].step_s == (2.0, 1.0)


def test_a_preempted_request_is_prefilled_again() -> None:
    scripts = {"0-0": [[1], [2], [], [3], [4]], "1-0": [[1], [2], [3], [4], [5], [6]]}
    engine = ScriptedEngine(scripts)
    records, _ = run_questions(
        engine, [(i, _question()) for i in range(2)], concurrency=2, clock=lambda: engine.now
    )
    # Nothing in the third step, and in the fourth the token that ends its second prefill.
    assert [record.turns[0].stalled for record in records] == [(2,), (2, 3)]


def test_a_step_that_only_ends_a_request_is_not_counted() -> None:
    engine = ScriptedEngine({"0-0": [[], [1], [2], []]})
    (record,), _ = run_questions(
        engine, [(0, _question())], concurrency=1, clock=lambda: engine.now
    )
    assert record.turns[0].step_sizes == (1, 1)
    assert record.turns[0].first_token_s == 2.0  # a chunk of the prefill gave nothing


def test_requests_in_flight_never_exceed_the_batch_and_records_are_in_order() -> None:
    scripts = {f"{i}-0": [[1]] * (5 - i) for i in range(5)}
    engine = ScriptedEngine(scripts)
    answered: list[int] = []
    records, _ = run_questions(
        engine,
        [(i, _question()) for i in range(5)],
        concurrency=2,
        clock=lambda: engine.now,
        on_answer=answered.append,
    )
    assert engine.most_active == 2
    assert [record.index for record in records] == [0, 1, 2, 3, 4]
    assert answered != sorted(answered)
    # The time to the first token is the engine's, not the length of our queue.
    assert {record.turns[0].first_token_s for record in records} == {1.0}


def test_later_turns_carry_the_models_own_answer() -> None:
    engine = ScriptedEngine({"7-0": [[1], [2, 3]], "7-1": [[4]]})
    (record,), _ = run_questions(
        engine, [(7, _question(follow_ups=("more?",)))], concurrency=1, clock=lambda: engine.now
    )
    assert engine.prompts["7-1"] == [3, len("123"), len("more?")]
    assert [turn.token_ids for turn in record.turns] == [(1, 2, 3), (4,)]
    assert [turn.num_prompt_tokens for turn in record.turns] == [1, 3]
    assert record.wall_s == 3.0


def test_answers_are_judged_by_what_they_hold() -> None:
    engine = ScriptedEngine({f"{i}-0": [[4, 8], [2, 1, 3]] for i in range(3)})
    questions = [replace(_question(), expected=text) for text in ("48213", "48214", None)]
    records, wall_s = run_questions(
        engine, list(enumerate(questions)), concurrency=3, clock=lambda: engine.now
    )
    assert [record.right for record in records] == [True, False, None]
    assert wall_s == 2.0
