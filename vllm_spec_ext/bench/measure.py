# SPDX-License-Identifier: Apache-2.0
"""The timed loop: keeps a fixed number of requests in flight and writes down every target step.

Each output of the engine that carries new tokens of a request is one target step of that request
(``RequestOutputKind.DELTA``), so tokens per step counts the bonus token, and steps without a
draft count as one. The first output of a request is its prefill step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from vllm_spec_ext.bench.long_context import holds
from vllm_spec_ext.bench.prompts import Message, Question
from vllm_spec_ext.bench.records import QuestionRecord, TurnRecord


@dataclass(frozen=True)
class StepOutput:
    """What one engine step gave one request."""

    request_id: str
    token_ids: Sequence[int]  # new tokens; empty if the step only finished the request
    finished: bool


class StepEngine(Protocol):
    """An engine driven step by step."""

    def add(self, request_id: str, token_ids: Sequence[int], seed: int) -> None:
        """Queue a request with this prompt."""

    def step(self) -> Sequence[StepOutput]:
        """Run one step; what each request got from it."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Prompt tokens of a conversation, the model to speak next."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, without special tokens."""


@dataclass
class _Active:
    """A question whose current turn is in the engine."""

    index: int
    question: Question
    messages: list[Message]
    num_prompt_tokens: int = 0
    started_s: float = 0.0
    first_token_s: float | None = None
    last_output_s: float = 0.0
    beside_prefill: bool = False  # since its last output
    skipped: bool = False  # by the last step
    step_s: list[float] = field(default_factory=list)
    stalled: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)


def run_questions(
    engine: StepEngine,
    questions: Sequence[tuple[int, Question]],
    *,
    concurrency: int,
    clock: Callable[[], float],
    on_answer: Callable[[int], None] = lambda index: None,
    on_step: Callable[[Sequence[int], int], None] | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> tuple[list[QuestionRecord], float]:
    """Answer all questions with ``concurrency`` requests in flight.

    A request is handed to the engine when another one ends, so that the time to the first token
    is the engine's and not the length of a queue. The turns of a question follow each other, each
    with the model's own earlier answers before it (as Spec-Bench).

    Args:
        engine: The engine; nothing else may be in it.
        questions: Pairs of index and question.
        concurrency: Requests in flight.
        clock: Monotonic clock, in seconds.
        on_answer: Called with the index of each question that is complete.
        on_step: Called with the answer so far and the number of tokens that were new; its time
            counts.
        after_step: Called after each step of the engine, also of one that gave nobody a token; its
            time counts, too.

    Returns:
        Records in order of their index, and the wall time of the whole pass in seconds.
    """
    # First turns are tokenised before the clock starts.
    waiting = deque(
        (_Active(index, question, list(question.opening)), engine.encode(question.opening))
        for index, question in questions
    )
    active: dict[str, _Active] = {}
    done: list[QuestionRecord] = []

    def submit(item: _Active, prompt: list[int]) -> None:
        request_id = f"{item.index}-{len(item.turns)}"
        item.num_prompt_tokens = len(prompt)
        item.tokens, item.steps, item.first_token_s = [], [], None
        item.step_s, item.stalled, item.beside_prefill, item.skipped = [], [], False, False
        item.started_s = item.last_output_s = clock()
        engine.add(request_id, prompt, item.index)
        active[request_id] = item

    begin = clock()
    while waiting or active:
        while waiting and len(active) < concurrency:
            submit(*waiting.popleft())
        outputs = engine.step()
        now = clock()
        after_step()
        served = {output.request_id for output in outputs if output.token_ids}
        # A request that got nothing although it had begun was preempted; its prefill comes again.
        prefilling = any(
            item.first_token_s is None or item.skipped or name not in served
            for name, item in active.items()
        )
        for name, item in active.items():
            item.skipped = name not in served
            item.beside_prefill |= prefilling and item.first_token_s is not None
        for output in outputs:
            item = active[output.request_id]
            if output.token_ids:
                if item.beside_prefill:
                    item.stalled.append(len(item.steps))
                item.step_s.append(now - item.last_output_s)
                item.last_output_s, item.beside_prefill = now, False
                item.tokens.extend(output.token_ids)
                item.steps.append(len(output.token_ids))
                if item.first_token_s is None:
                    item.first_token_s = now - item.started_s
                if on_step is not None:
                    on_step(item.tokens, len(output.token_ids))
            if output.finished:
                del active[output.request_id]
                item.turns.append(_close_turn(item, now))
                if len(item.turns) <= len(item.question.follow_ups):
                    answer = engine.decode(item.tokens)
                    ask = item.question.follow_ups[len(item.turns) - 1]
                    item.messages += [
                        {"role": "assistant", "content": answer},
                        {"role": "user", "content": ask},
                    ]
                    submit(item, engine.encode(item.messages))
                else:
                    done.append(
                        QuestionRecord(item.index, item.question.category, tuple(item.turns))
                    )
                    on_answer(item.index)
    wall_s = clock() - begin
    expected = {index: question.expected for index, question in questions}
    judged = [_judged(record, expected[record.index], engine) for record in done]
    return sorted(judged, key=lambda record: record.index), wall_s


def _judged(record: QuestionRecord, expected: str | None, engine: StepEngine) -> QuestionRecord:
    """With a word on the answer, after the clock has stopped."""
    if expected is None:
        return record
    answer = engine.decode(record.turns[-1].token_ids)
    return replace(record, right=holds(answer, expected))


def _close_turn(item: _Active, now: float) -> TurnRecord:
    wall_s = now - item.started_s
    return TurnRecord(
        num_prompt_tokens=item.num_prompt_tokens,
        token_ids=tuple(item.tokens),
        step_sizes=tuple(item.steps),
        first_token_s=wall_s if item.first_token_s is None else item.first_token_s,
        wall_s=wall_s,
        step_s=tuple(round(seconds, 6) for seconds in item.step_s),
        stalled=tuple(item.stalled),
    )
