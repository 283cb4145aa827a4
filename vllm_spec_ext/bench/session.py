# SPDX-License-Identifier: Apache-2.0
"""A whole benchmark: all engines up, then interleaved passes, then the figures."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from vllm_spec_ext.bench.drift import Drift, drift_of, first_answers
from vllm_spec_ext.bench.engine_client import EngineClient, EngineFailed
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.records import EngineFacts, EngineRun, Run
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.bench.statistics import Summary, summarise
from vllm_spec_ext.bench.vllm_engine import Sampling
from vllm_spec_ext.errors import SpecExtError

MIN_FREE_BYTES = 512 << 20
TURN = 4  # answers; a whole batch, where that is more
_LOG_NAME = 60  # characters of a label; a file's name may have 255 bytes


class Events:
    """What happens, for a progress display; this one shows nothing."""

    def engine_starting(self, name: str) -> None:
        """An engine is being started and warmed up."""

    def engine_ready(self, name: str, facts: EngineFacts) -> None:
        """It is up."""

    def engine_failed(self, name: str, reason: str) -> None:
        """It could not be started, or died; its method is dropped."""

    def passes_starting(self, batch_size: int, repeat: int) -> None:
        """A timed pass of every engine begins; they take turns."""

    def answered(self) -> None:
        """One more prompt of this pass is complete."""


@dataclass
class BenchResult:
    """Everything that a report is made from."""

    settings: BenchSettings
    methods: list[Method]
    questions: list[Question]
    facts: dict[str, EngineFacts] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # method -> reason
    drifts: list[Drift] = field(default_factory=list)  # of the lossy methods
    interrupted: bool = False  # with some passes complete
    stopped_by: BaseException | None = None  # what interrupted it, if that was not the user

    @property
    def plain(self) -> str:
        """Name of the method that decodes plainly."""
        return next(method.name for method in self.methods if method.config is None)

    def summaries(self) -> list[Summary]:
        """The figures of each method and batch size."""
        return summarise(self.runs, self.plain)

    def must_be_identical(self, name: str) -> bool:
        """Whether any difference from plain decoding is a failure.

        In float32, greedy verification gives plain decoding's tokens. In 16 bits a batch of
        another shape rounds differently, so that two nearly equal logits may swap places.
        """
        facts = self.facts.get(name)
        return bool(
            facts
            and facts.lossless
            and facts.dtype == "float32"
            and self.settings.temperature == 0
            and name != self.plain
        )

    def broken_promises(self) -> list[Summary]:
        """Summaries whose answers had to be identical and are not."""
        return [
            summary
            for summary in self.summaries()
            if self.must_be_identical(summary.method)
            and summary.num_identical < summary.num_compared
        ]


def rotated(names: Sequence[str], repeat: int) -> list[str]:
    """The order of one repeat: A B C, B C A, C A B, so that none is always first."""
    shift = repeat % len(names) if names else 0
    return [*names[shift:], *names[:shift]]


def log_name(method: str) -> str:
    """File for the log of a method's engine; labels may be long and hold any character.

    Where something is replaced or cut, a part of the label's checksum keeps two of them apart.
    """
    safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in method)[:_LOG_NAME]
    if safe != method:
        safe += "-" + hashlib.sha256(method.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{safe}.log"


def sampling_of(settings: BenchSettings) -> Sampling:
    """The part of the settings that each request carries."""
    return Sampling(settings.max_tokens, settings.temperature, settings.seed, settings.raw)


@contextlib.contextmanager
def engines_running(
    result: BenchResult, log_dir: Path, events: Events, *, at_once: int = 1
) -> Iterator[dict[str, EngineClient]]:
    """Start one engine a method; all but the one at work are paused.

    A method that cannot be started is noted in ``result.failures`` and left out.

    Args:
        result: Settings and methods; takes facts and failures.
        log_dir: Existing folder for the engines' logs.
        events: Hears of starts.
        at_once: Engines that start at the same time. On a GPU 1: vLLM measures there what is left
            of the memory while it starts.

    Raises:
        EngineFailed: Plain decoding cannot be started: there is nothing to compare with.
        SpecExtError: A prompt does not fit the model, or the engines do not fit the memory.
    """
    clients: dict[str, EngineClient] = {}
    pool = ThreadPoolExecutor(at_once)
    try:
        for method in result.methods:
            log = log_dir / log_name(method.name)
            clients[method.name] = EngineClient(method.name, log)
        starts = [
            pool.submit(_start, result, method, clients[method.name], events)
            for method in result.methods
        ]
        for method, start in zip(result.methods, starts, strict=True):
            try:
                facts = start.result()
            except EngineFailed as error:
                if method.config is None:
                    raise EngineFailed(
                        f"plain decoding does not start: {error} [log: {clients[method.name].log}]"
                    ) from error
                _drop(result, clients, method.name, error, events)
                continue
            result.facts[method.name] = facts
            events.engine_ready(method.name, facts)
            _require_memory(len(result.facts))
        yield clients
    finally:
        # Not waiting: a start that is under way ends with its engine.
        pool.shutdown(wait=False, cancel_futures=True)
        for client in clients.values():
            client.begin_to_close()  # all at the same time
        for client in clients.values():
            client.close()


def _start(
    result: BenchResult, method: Method, client: EngineClient, events: Events
) -> EngineFacts:
    """One engine up, warm and paused."""
    settings = result.settings
    events.engine_starting(method.name)
    client.start(
        settings.model,
        method,
        settings.llm_args(),
        sampling_of(settings),
        len(result.methods),
    )
    facts = client.prepare(result.questions, settings.warm_up, max(settings.batch_size))
    client.pause()
    return facts


def run_benchmark(result: BenchResult, log_dir: Path, events: Events) -> None:
    """Fill ``result`` with runs; raises as :func:`engines_running`.

    Interrupted, it keeps the passes that are complete: they may have taken an hour.
    """
    try:
        with engines_running(result, log_dir, events) as clients:
            for batch_size in result.settings.batch_size:
                for repeat in range(result.settings.repeats):
                    _run_in_turns(result, clients, batch_size, repeat, events)
            if result.settings.temperature == 0 and result.plain in clients:
                _measure_drifts(result, clients, events)
    # A later turn is too long, or the display failed (rich: SystemExit where nobody reads it).
    except (KeyboardInterrupt, SpecExtError, OSError, SystemExit) as error:
        if not result.runs:
            raise
        result.interrupted = True
        result.stopped_by = None if isinstance(error, KeyboardInterrupt) else error


def _run_in_turns(
    result: BenchResult,
    clients: dict[str, EngineClient],
    batch_size: int,
    repeat: int,
    events: Events,
) -> None:
    """One repeat: every method over all questions, in turns; failed ones are dropped.

    A machine's speed drifts over the minutes of a whole pass, so no engine has it for long.
    Requests stay in flight while others have their turn, so that turns empty no batch.
    """
    indices = range(len(result.questions))
    turn = max(TURN, batch_size)
    events.passes_starting(batch_size, repeat)
    passes = {
        name: clients[name].run_in_turns(indices, batch_size, turn, lambda _: events.answered())
        for name in rotated(list(clients), repeat)
    }
    measured: dict[str, EngineRun] = {}
    number = 0
    while len(measured) < len(passes):
        for name in rotated(list(passes), number):
            if name in measured:
                continue
            try:
                run = next(passes[name])
            except EngineFailed as error:
                del passes[name]
                _drop(result, clients, name, error, events)
                continue
            clients[name].pause()
            if run is not None:
                measured[name] = run
        number += 1
    for name in passes:
        result.runs.append(Run(name, batch_size, repeat, measured[name]))


def _measure_drifts(result: BenchResult, clients: dict[str, EngineClient], events: Events) -> None:
    """Fill ``result.drifts``; if plain decoding dies of it, all that was timed is still there."""
    try:
        for drift in _drifts(result, clients[result.plain]):
            result.drifts.append(drift)
    except EngineFailed as error:
        reason = EngineFailed(f"all passes are timed, but not every drift is measured: {error}")
        _drop(result, clients, result.plain, reason, events)


def _drifts(result: BenchResult, plain: EngineClient) -> Iterator[Drift]:
    """How far each lossy method's first pass went from plain decoding's."""
    firsts = {(run.method, run.batch_size): run for run in result.runs if run.repeat == 0}
    for (name, batch_size), run in firsts.items():
        base = firsts.get((result.plain, batch_size))
        if result.facts[name].lossless or base is None:
            continue
        yield drift_of(run, base, plain.score(first_answers(run)), plain.score(first_answers(base)))


def _drop(
    result: BenchResult,
    clients: dict[str, EngineClient],
    name: str,
    error: EngineFailed,
    events: Events,
) -> None:
    result.failures[name] = f"{error} [log: {clients[name].log}]"
    clients.pop(name).close()
    events.engine_failed(name, result.failures[name])


def _require_memory(num_engines: int) -> None:
    """Where memory is nearly gone, programs are read from disk again and again: no time is true.

    Raises:
        SpecExtError: Less than ``MIN_FREE_BYTES`` are available.
    """
    import psutil

    available = psutil.virtual_memory().available
    if available < MIN_FREE_BYTES:
        raise SpecExtError(
            f"{available >> 20} MiB of memory are left with {num_engines} engines started, "
            f"expected at least {MIN_FREE_BYTES >> 20}: measure fewer methods in one run, or lower "
            "--max-model-len or --engine-arg kv_cache_memory_bytes"
        )
