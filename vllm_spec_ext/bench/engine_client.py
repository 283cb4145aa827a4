# SPDX-License-Identifier: Apache-2.0
"""The parent's handle on one engine process: commands, pausing, and a sure end.

Idle engines are *stopped* (SIGSTOP to the process group) while another one is measured. vLLM's
worker spins on shared memory for a second after its last step and polls afterwards
(``shm_broadcast.SpinCondition``, vLLM 0.32), so that an idle engine would take a core from the
one being measured just after the change-over.

An engine is taken for dead if it takes no step for ``SILENCE_S`` (it says when it does) and its
processes hardly use a processor or a disk either: while it starts, fetches a model, or computes one
very long step, that is all there is to see. Seen so, an endless loop looks like work, which is why
work without a step is waited for no longer than ``START_S`` or ``STEP_S``; and a download whose
server sends nothing looks like death.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

from vllm_spec_ext.bench.group_work import LEAST_BYTES, LEAST_CORE, work_of
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.records import EngineFacts, EngineRun
from vllm_spec_ext.errors import SpecExtError

CHILD_MODULE = "vllm_spec_ext.bench.engine_process"
STOP_TIMEOUT_S = 20.0
SILENCE_S = 900.0  # without a step; from then on its processes must be at work
LOOK_S = 60.0  # of silence, before it is looked at what they do
STEP_S = 3600.0  # for one step, though they are at work
START_S = 4 * 3600.0  # for a start, which may fetch a large model first
MAX_MESSAGE = 500  # characters; vLLM's validation errors list everything it knows

# What vLLM raises only to say that the reason stands further up in the log.
_FOLLOW_UPS = ("Engine core initialization failed", "WorkerProc initialization failed", "See root")
_ERROR_LINE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (\S.*)")


class EngineFailed(SpecExtError):
    """An engine could not be started, or died; the message holds the reason from its log."""


class EngineClient:
    """One engine in its own process group."""

    def __init__(self, name: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start the process; the engine itself is started by :meth:`start`.

        Args:
            name: The method's name, for messages.
            log: File for everything the engine prints.
            environment: Variables beside the caller's own.
        """
        self.name = name
        self.log = log
        self.paused = False
        self.busy = False
        self.closing = False
        self.pipe, child = Pipe()
        alive, self.alive = os.pipe()  # if it closes without a byte, we were killed
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        # An engine may be paused while a step is under way; with vLLM's default of 300 s it would
        # die when it is woken up again.
        env.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "86400")
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", CHILD_MODULE, str(child.fileno()), str(alive)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=(child.fileno(), alive),
                # A group of its own, to stop as one.
                process_group=0,
            )
        child.close()
        os.close(alive)

    def start(
        self,
        model: str,
        method: Method,
        engine_args: Mapping[str, Any],
        sampling: Any,
        num_engines: int = 1,
    ) -> EngineFacts:
        """Start the engine; raises :class:`EngineFailed` with the reason.

        Args:
            model: Name or folder of the target.
            method: What drafts.
            engine_args: ``LLM`` arguments of the user.
            sampling: How answers are generated.
            num_engines: Engines that share the machine's memory, this one included.
        """
        try:
            arguments = (model, method, dict(engine_args), sampling, num_engines)
            return self._ask("start", *arguments, most_s=START_S)
        except EngineFailed:
            raise
        except SpecExtError as error:  # settings that this method refuses: others may go on
            raise EngineFailed(str(error)) from error

    def check(self, model: str, method: Method, engine_args: Mapping[str, Any]) -> None:
        """Check a configuration as the engine would, and start none; see ``EngineServer.check``.

        Raises:
            SpecExtError: The method's options or files are refused.
        """
        self._ask("check", model, method, dict(engine_args), most_s=START_S)

    def prepare(self, questions: Sequence[Question], warm_up: int, concurrency: int) -> EngineFacts:
        """Hand over the questions and warm up; SpecExtError if one does not fit the model."""
        return self._ask("prepare", list(questions), warm_up, concurrency)

    def run(
        self,
        indices: Sequence[int],
        concurrency: int,
        on_answer: Callable[[int], None] = lambda index: None,
        on_step: Callable[[list[str]], None] | None = None,
        *,
        fresh: bool = True,
    ) -> EngineRun:
        """One timed pass over some of the questions.

        Args:
            indices: Which questions.
            concurrency: Requests in flight.
            on_answer: Called with the index of each complete answer.
            on_step: Called with the text of each token of a step, as it comes; concurrency 1 only.
            fresh: Forget earlier passes first; else this goes on with one that was begun.
        """
        arguments = (list(indices), concurrency, on_step is not None, fresh)
        return self._ask("run", *arguments, on_progress=on_answer, on_step=on_step)

    def run_in_turns(
        self,
        indices: Sequence[int],
        concurrency: int,
        turn: int,
        on_answer: Callable[[int], None] = lambda index: None,
    ) -> Iterator[EngineRun | None]:
        """One timed pass, from a clean state, that lets others have the machine in between.

        Args:
            indices: Which questions.
            concurrency: Requests in flight; they stay so between the turns.
            turn: Answers in a turn.
            on_answer: Called with the index of each complete answer.

        Yields:
            None after each turn but the last: the clock of the pass stands until the next one is
            asked for, and :meth:`pause` may be called. At last the run.
        """
        arguments = (list(indices), concurrency, False, True, turn)
        measured = self._ask("run", *arguments, on_progress=on_answer)
        while measured is None:
            yield None
            measured = self._ask("go_on", on_progress=on_answer)
        yield measured

    def score(self, answers: Sequence[tuple[int, Sequence[int]]]) -> list[float]:
        """Sum of the token log-probabilities of each answer (question index, tokens)."""
        return self._ask("score", list(answers))

    def trace(self, index: int) -> dict[str, Any]:
        """Answer one question with every draft on record; see ``EngineServer.trace``."""
        return self._ask("trace", index)

    def record(self, indices: Sequence[int], concurrency: int) -> dict[str, Any]:
        """Answer questions with every draft on record; see ``EngineServer.record``."""
        return self._ask("record", list(indices), concurrency)

    def answers(
        self, indices: Sequence[int], concurrency: int
    ) -> list[tuple[list[int], list[int]]]:
        """Prompts and answers; see ``EngineServer.answers``."""
        return self._ask("answers", list(indices), concurrency)

    def pause(self) -> None:
        """Stop all processes of the engine; it then takes no CPU time at all."""
        self._signal(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        if self.paused:
            self._signal(signal.SIGCONT)
            self.paused = False

    def begin_to_close(self) -> None:
        """Ask the engine to end, and wait for nothing."""
        if self.closing:
            return
        self.closing = True
        self.resume()
        if self.busy:  # it does not read commands now: Ctrl-C in the middle of a pass
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
        else:
            with contextlib.suppress(OSError):
                self.pipe.send(("stop", ()))

    def close(self) -> None:
        """End all processes of the engine, politely first."""
        self.begin_to_close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        # The group outlives its leader if an engine process hangs.
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.pipe.close()
        with contextlib.suppress(BrokenPipeError):
            os.write(self.alive, b"x")  # nothing left to do for the watchdog
        os.close(self.alive)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(
        self,
        command: str,
        *arguments: object,
        on_progress: Callable[[int], None] = lambda index: None,
        on_step: Callable[[list[str]], None] | None = None,
        most_s: float | None = None,
    ) -> Any:
        self.resume()
        self.busy = True  # stays so if we are interrupted
        with self._end_explained():
            self.pipe.send((command, arguments))
        while True:
            # What is called with a message stays outside: a full disk there is not the engine's.
            with self._end_explained():
                self._await_message(most_s or STEP_S)
                kind, value = self.pipe.recv()
            self.busy = kind in ("step", "progress", "alive")
            if kind in ("ok", "turn"):
                return value
            if kind == "error":
                raise EngineFailed(self._explain(str(value)))
            if kind == "refused":
                raise SpecExtError(str(value))
            if kind == "step" and on_step is not None:
                on_step(value)
            elif kind == "progress":
                on_progress(value)

    def _await_message(self, most_s: float) -> None:
        """Until there is one; EngineFailed if the engine must be taken for dead (see above)."""
        if self.pipe.poll(LOOK_S):
            return
        began, window = time.monotonic() - LOOK_S, SILENCE_S - LOOK_S
        before = work_of(self.process.pid)
        while not self.pipe.poll(window):
            now, silent_s = work_of(self.process.pid), time.monotonic() - began
            if not now.differs(before, window):
                raise EngineFailed(
                    self._explain(
                        f"no sign of life for {silent_s:.0f} s: no step, and less than "
                        f"{LEAST_CORE:.0%} of a core and {LEAST_BYTES >> 20} MiB of disk used in "
                        f"the last {window:.0f} s; look at its log, or start it again"
                    )
                )
            if silent_s > most_s:
                raise EngineFailed(
                    self._explain(
                        f"at work, but took no step for {silent_s:.0f} s, expected one in "
                        f"{most_s:.0f}: an endless loop, or too much for this machine; ask for "
                        "less at a time (--batch-size, --max-model-len), or take a smaller model"
                    )
                )
            before = now

    @contextlib.contextmanager
    def _end_explained(self) -> Iterator[None]:
        """Turn a broken pipe into EngineFailed with the process's status."""
        try:
            yield
        except (EOFError, OSError) as error:
            status = self.process.wait()
            raise EngineFailed(self._explain(f"its process ended with status {status}")) from error

    def _explain(self, text: str) -> str:
        log = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return with_cause(text, root_cause(log))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def with_cause(text: str, cause: str | None) -> str:
    """An error and its cause on one line of bearable length."""
    text = " ".join(text.split())
    if cause:
        # The log names an exception with its module, the reply without.
        name, _, rest = cause.partition(": ")
        if f"{name.rpartition('.')[2]}: {rest}" not in text:
            text = f"{text} (cause: {cause})"
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def root_cause(log: str) -> str | None:
    """The first error of a log that is not a mere consequence; ``None`` if there is none.

    vLLM prints the traceback of a failed process first and then those of the ones that waited
    for it; each ends with ``NameOfError: text``.
    """
    for line in log.splitlines():
        found = _ERROR_LINE.search(line)
        if found and not any(text in line for text in _FOLLOW_UPS):
            return f"{found[1]}: {found[2].strip()}"
    return None
