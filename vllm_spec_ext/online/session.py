# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a folder: which version drafts, and what is recorded.

Everything slow, reading and checking files, is done by a thread; between two steps the engine only
takes up what the thread has made ready. Of several replicas and servers on a folder the first
decides, the others serve what it serves, and another server takes over once it ends.
"""

import contextlib
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from vllm_spec_ext.atomic import DiskFullError, remove_partials
from vllm_spec_ext.environment import READ_ONLY, is_set
from vllm_spec_ext.errors import RanksApartError, SpecExtError
from vllm_spec_ext.online.folder import (
    ENGINE_LOCK,
    FACTS,
    SAMPLES,
    STATE,
    TRAINER_LOG,
    Control,
    EngineState,
    FolderFacts,
    TrainerState,
    Verdict,
    check_folder,
    folder_path,
    read_record,
    write_record,
)
from vllm_spec_ext.online.folder_lock import FolderLock
from vllm_spec_ext.online.sample_files import SampleWriter
from vllm_spec_ext.online.tap import Tap
from vllm_spec_ext.online.trial import Role, Trial
from vllm_spec_ext.online.versions import (
    VERSIONS,
    check_version,
    drafter_hash,
    version_folder,
    version_numbers,
    write_version,
)
from vllm_spec_ext.options import OnlineOptions
from vllm_spec_ext.proposers.base import Draft, Learns, RequestStep, StepOutcome

logger = logging.getLogger("vllm.spec_ext")

_POLL_S = 0.25
_TELL_S = 2.0
_READ_AGAIN_S = 30.0
_KEPT_VERDICTS = 50
_KEPT_SERVED = 4


@dataclass(frozen=True)
class Origin:
    """The drafter that a folder belongs to."""

    method: str
    target: str
    vocab_size: int
    folder: Path  # with the weights of the start
    read_files: Callable[[], Mapping[str, bytes]]  # of version 0, by name; may take gigabytes
    drafting: Mapping[str, int] = field(default_factory=dict)  # as of FolderFacts

    @cached_property
    def drafter(self) -> str:
        """Their hash."""
        return drafter_hash(self.read_files())


@dataclass(frozen=True)
class _Lead:
    """The server that decided has ended: what it knew, for this one to go on from."""

    state: EngineState
    weights: object  # of the version that it served


# By which vLLM binds a CPU worker's threads to cores of their own (0.32 OMPProcessManager).
_PINNING = (
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)


@contextlib.contextmanager
def _on_all_cores() -> Iterator[None]:
    """What this thread starts meanwhile may run where the worker's parent may.

    A CPU worker is bound to the cores that it computes on. A trainer there would share exactly
    these, and leave the one alone that vLLM keeps free for other processes.
    """
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, own | os.sched_getaffinity(os.getppid()))
    except OSError:  # cores of another container
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


@dataclass(frozen=True)
class _Ready:
    """A version that the thread has read; the engine is to serve it, or to try it."""

    number: int
    weights: object
    serve: str | None  # why it is to be served at once; None = it is to be tried
    order: int | None = None  # that is obeyed by it


class _Drafter(NamedTuple):
    """Who made a request's draft."""

    role: Role
    version: int
    compared: bool  # as of Trial.count


class OnlineSession:
    """Of one engine; all but the thread's own methods are called by the engine's step."""

    def __init__(
        self,
        options: OnlineOptions,
        origin: Origin,
        learner: Learns,
        *,
        is_first: bool = True,
        fresh: bool = False,
    ) -> None:
        """Open the folder and serve the version that was kept last.

        Args:
            options: What the user asked for.
            origin: The drafter.
            learner: Has the weights of the start.
            is_first: Of the replicas of a server this one records and decides, unless another
                server does.
            fresh: Begin with the weights of the start, whatever was learned before. A replica takes
                up what is learned from then on; a process that writes no files keeps them.

        Raises:
            SpecExtError: The folder is another drafter's, or cannot be written.
        """
        self._options, self._origin, self._learner = options, origin, learner
        self._is_fresh = fresh
        self._root = folder_path(options)
        # Versions up to this one are not taken up from the replica or server that decides.
        self._left_out: float = 0
        if fresh:
            newest = max(version_numbers(self._root), default=0)
            self._left_out = math.inf if is_set(READ_ONLY) else newest
        self._lead = FolderLock(self._root / ENGINE_LOCK) if is_first else None
        self.tap: Tap | None = None
        self._writer: SampleWriter | None = None
        self._trainer: subprocess.Popen[bytes] | None = None
        check_folder(self._root, origin.method, origin.drafter)
        self._is_first = is_first and self._may_lead()
        self._trial = Trial(options.trial_steps, options.guard, options.seed)
        try:
            if self._is_first:
                self._open_folder()
            elif is_first:
                logger.warning(
                    "vllm-spec-ext: online: another server works on %s; this one serves what that "
                    "one does, and records nothing until it ends",
                    self._root,
                )
            self._weights: dict[int, object] = {0: self._first_weights()}
            self._state = self._first_state()
        except BaseException:
            self._release()
            raise
        self._using = -1
        self._turn_left = 0  # steps
        self._is_frozen = False  # in this step; the thread changes the state at any time
        self._drafted_by: dict[str, _Drafter] = {}
        self._ready: _Ready | None = None
        self._offered: _Lead | None = None
        self._has_stepped = False  # since the thread looked
        self._wants_trainer = options.start_trainer
        self._unreadable = -1  # a version that a follower could not read
        self._read_again_at = 0.0
        self._lock = threading.RLock()
        self._stop = threading.Event()
        if self._is_first:
            self._start_recording()
            self._start_trainer()
        self._use(self._state.serving)
        self._thread = threading.Thread(target=self._watch, name="spec-ext-online", daemon=True)
        self._thread.start()

    # What the engine's step calls.

    @property
    def state(self) -> EngineState:
        """As it will be written."""
        return self._state

    @property
    def num_likeliest(self) -> int:
        """Most likely tokens of the target that are recorded at a row."""
        return self._options.likeliest

    def begin_step(self) -> None:
        """Take up what is ready, and let one version draft the step."""
        before = self._state
        ready, self._ready = self._ready, None
        if ready is not None:
            self._take(ready)
        if self._offered is not None:
            with self._lock:
                offered, self._offered = self._offered, None
                if offered is not None:  # the thread may have withdrawn it
                    self._take_over(offered)
        self._has_stepped = True
        if self._is_first:
            self._decide()
        ends = (before.serving, before.trying) != (self._state.serving, self._state.trying)
        was_frozen, self._is_frozen = self._is_frozen, self._state.frozen
        if self._turn_left <= 0 or ends or was_frozen != self._is_frozen:
            self._role = self._trial.role(
                self._is_first and self._state.serving != 0, self._is_frozen
            )
            self._turn_left = self._learner.steps_a_turn
        self._turn_left -= 1
        self._use_or_refuse(self._version_of(self._role))
        if len(self._weights) > 1:  # a version that was refused drafts no more, and is let go
            kept = {0, self._state.serving, self._state.trying, self._using}
            self._weights = {name: value for name, value in self._weights.items() if name in kept}

    def drafted(self, requests: Sequence[RequestStep], drafts: Sequence[Draft]) -> None:
        """Remember who drafted for whom; a request without a draft gets nothing accepted."""
        for request, draft in zip(requests, drafts, strict=True):
            self._drafted_by.pop(request.request_id, None)
            if len(draft):
                drafter = _Drafter(self._role, self._using, not self._is_frozen)
                self._drafted_by[request.request_id] = drafter
            elif request.room > 0:
                self._trial.count(self._role, 0, compared=not self._is_frozen)

    def verified(self, outcomes: Sequence[StepOutcome]) -> None:
        """Count what became of the drafts, for the version that made them."""
        for outcome in outcomes:
            made = self._drafted_by.pop(outcome.request_id, None)
            if made is not None and made.version == self._version_of(made.role):
                self._trial.count(made.role, outcome.num_accepted, compared=made.compared)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._drafted_by.pop(request_id, None)
        if self.tap is not None:
            self.tap.finish(request_ids)

    def gauges(self) -> list[float]:
        """In the order of ``ONLINE_GAUGES`` (engine/watching/metric_names.py)."""
        last = self._state.verdicts[-1] if self._state.verdicts else None
        guard, serving = self._trial.guard.mean, self._trial.serving.mean
        nan = float("nan")
        return [
            float(self._state.serving),
            self._state.since,
            nan if serving is None else serving,
            nan if guard is None else guard,
            nan if last is None else last.before,
            nan if last is None else last.after,
            self._core_share,
            float(self._num_recorded),
            float(self._num_lost),
        ]

    def flush(self) -> None:
        """Write what was recorded of finished requests now; waits for the disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left and stop what was started; calls after the first do nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._trainer is not None:  # soon, as it takes a while
            self._trainer.terminate()
        if self.tap is not None and self._writer is not None:
            self.tap.finish(self.tap.open_requests)
            self._writer.close()
        self._thread.join(timeout=5.0)
        if self._is_first:
            with contextlib.suppress(OSError, SpecExtError):
                write_record(self._root, self._told())
        if self._trainer is not None:
            self._trainer.terminate()  # the thread may have started it meanwhile
            try:
                self._trainer.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                # Of the lowest priority, it may hardly run on a busy machine. To kill it would
                # lose what it has learned since its last version.
                logger.info("vllm-spec-ext: online: the trainer ends once it has saved its state")
        self._release()

    def _release(self) -> None:
        if self._lead is not None:
            self._lead.release()

    # Starting.

    def _may_lead(self) -> bool:
        """Whether no other server decides about the folder."""
        assert self._lead is not None
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what people wrote
            return self._lead.take()
        except OSError as error:
            raise SpecExtError(f"online: cannot write to {self._root}: {error}") from error

    def _first_weights(self) -> object:
        """Of version 0: the folder's own copy is written once, the drafter may change meanwhile."""
        try:
            return self._read(0)
        except SpecExtError as error:
            if version_folder(self._root, 0).is_dir():
                logger.warning("vllm-spec-ext: online: %s; reading the drafter itself", error)
            return self._learner.read_weights(self._origin.folder)

    def _open_folder(self) -> None:
        origin = self._origin
        try:
            for name in (FACTS, STATE, f"{SAMPLES}/*", f"{VERSIONS}/v00000000"):
                remove_partials(self._root, name)
            if 0 not in version_numbers(self._root):
                write_version(self._root, 0, origin.read_files(), origin.drafter)
            facts = FolderFacts(
                method=origin.method,
                target=origin.target,
                drafter=origin.drafter,
                vocab_size=origin.vocab_size,
                options=self._options,
                drafting=dict(origin.drafting),
            )
            known = read_record(self._root, FolderFacts)
            if facts != known:
                try:
                    write_record(self._root, facts)
                except DiskFullError as error:
                    if known is None:
                        raise
                    logger.warning("vllm-spec-ext: online: %s", error)
        except OSError as error:
            raise SpecExtError(f"online: cannot write to {self._root}: {error}") from error

    def _first_state(self) -> EngineState:
        state = self._former_state()
        if state.serving:
            try:
                self._weights[state.serving] = self._read(state.serving)
            except SpecExtError as error:
                logger.warning("vllm-spec-ext: online: starting with version 0: %s", error)
                state = state.model_copy(update={"serving": 0})
        return state

    def _former_state(self) -> EngineState:
        """What was known when the last server ended; a fresh one takes up nothing of it."""
        state = read_record(self._root, EngineState) or EngineState()
        handled = state.handled if state.trying is None else state.trying - 1  # it is tried again
        changes = {"trying": None, "handled": handled, "since": time.time()}
        if self._is_fresh:
            newest = max(version_numbers(self._root), default=0)
            changes |= {"serving": 0, "handled": newest}
        return state.model_copy(update=changes)

    def _start_recording(self) -> None:
        writer = self._writer = SampleWriter(self._root / SAMPLES, self._options)
        self.tap = Tap(self._options, writer.put)
        self.tap.bytes_elsewhere = lambda: writer.pending_bytes

    def _start_trainer(self) -> None:
        """Once, if it is wanted."""
        if not self._wants_trainer:
            return
        self._wants_trainer = False
        command = [sys.executable, "-m", "vllm_spec_ext.online.trainer", str(self._root)]
        try:
            with open(self._root / TRAINER_LOG, "ab") as log, _on_all_cores():
                self._trainer = subprocess.Popen(
                    [*command, "--parent", str(os.getpid())],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env={name: value for name, value in os.environ.items() if name not in _PINNING},
                )
        except OSError as error:  # a full disk
            logger.warning("vllm-spec-ext: online: no trainer was started: %s", error)

    # Another server decided.

    def _offer_lead(self) -> None:
        """Once the server that decided has ended; a server without requests waits."""
        if not self._has_stepped or not self._may_lead():
            return
        self._open_folder()
        state = self._former_state()
        try:
            weights = self._known_or_read(state.serving)
        except SpecExtError as error:
            self._say(str(error))
            state, weights = state.model_copy(update={"serving": 0}), self._weights[0]
        with self._lock:
            if not self._is_first:
                self._offered = _Lead(state, weights)

    def _withdraw_lead(self) -> None:
        """No step took it up: another server may have requests."""
        with self._lock:
            withdrawn, self._offered = self._offered, None
        if withdrawn is not None and self._lead is not None:
            self._lead.give_back()

    def _take_over(self, lead: _Lead) -> None:
        self._weights[lead.state.serving] = lead.weights
        self._set(**dict(lead.state))
        self._trial.changed()  # what it counted alone says nothing beside the guard's share
        self._start_recording()
        self._is_first = True
        logger.info("vllm-spec-ext: online: this server decides about %s now", self._root)

    # Between two steps.

    _role: Role = "serving"
    _core_share = 0.0

    def _version_of(self, role: Role) -> int:
        if role == "guard":
            return 0
        if role == "trial" and self._state.trying is not None:
            return self._state.trying
        return self._state.serving

    def _use(self, number: int) -> None:
        if number != self._using:
            self._using = -1  # where it fails nobody knows what is there
            self._learner.use_weights(self._weights[number])
            self._using = number

    def _use_or_refuse(self, number: int) -> None:
        """Use a version; one that cannot be used (a GPU may have no room left) is refused."""
        try:
            self._use(number)
        except RanksApartError:
            raise
        except Exception as error:
            self._say(f"version {number} cannot be used: {type(error).__name__}: {error}")
            if number == self._state.trying:
                self._judge(number, False, _refused(error), 0.0, 0.0)
                self._trial.cancel()
                self._set(trying=None)
            elif number == self._state.serving and number:
                self._judge(number, False, _refused(error), 0.0, 0.0)
                self._serve(0, "the version in use cannot be used any more")
            self._role, self._turn_left = "serving", 0
            self._use(self._state.serving)

    def _take(self, ready: _Ready) -> None:
        if self._state.frozen and ready.serve is None:
            return  # it is read again afterwards
        self._weights[ready.number] = ready.weights
        if ready.serve is not None:
            self._serve(ready.number, ready.serve)
            if ready.order is not None:  # not before: the server may end without another step
                self._set(obeyed=ready.order)
            return
        self._set(trying=ready.number, handled=max(ready.number, self._state.handled))
        self._trial.begin()

    def _decide(self) -> None:
        decision = self._trial.decision()
        number = self._state.trying
        if self._state.frozen:
            return
        if decision is not None and number is not None:
            self._judge(number, decision.kept, decision.reason, decision.before, decision.after)
            if decision.kept:
                self._serve(number, "it was better")
            else:
                self._trial.cancel()
                self._set(trying=None)
        elif self._state.serving and self._trial.has_fallen():
            before, after = self._trial.guard.mean or 0.0, self._trial.serving.mean or 0.0
            self._judge(self._state.serving, False, "fell behind version 0", before, after)
            self._serve(0, "the version in use fell behind it")

    def _serve(self, number: int, why: str) -> None:
        logger.info("vllm-spec-ext: online: version %d drafts now: %s", number, why)
        self._trial.changed()
        served = (*(former for former in self._state.served if former < number), number)
        self._set(serving=number, trying=None, since=time.time(), served=served[-_KEPT_SERVED:])

    def _judge(self, number: int, kept: bool, reason: str, before: float, after: float) -> None:
        verdict = Verdict(
            version=number, kept=kept, reason=reason, before=before, after=after, when=time.time()
        )
        with self._lock:  # the thread judges, too: versions that cannot be read
            self._set(verdicts=(*self._state.verdicts, verdict)[-_KEPT_VERDICTS:])

    def _set(self, **changes: object) -> None:
        with self._lock:
            self._state = self._state.model_copy(update=changes)

    # The thread.

    def _watch(self) -> None:
        told = 0.0
        while not self._stop.wait(_POLL_S):
            try:
                if self._is_first:
                    self._look()
                elif self._offered is None:
                    self._follow()
                if time.monotonic() - told < _TELL_S:
                    continue
                told = time.monotonic()
                if not self._is_first and self._lead is not None:
                    self._withdraw_lead()
                    self._offer_lead()
                    self._has_stepped = False
                elif self._is_first:
                    self._start_trainer()
                    write_record(self._root, self._told())
                    trainer = read_record(self._root, TrainerState)
                    alive = trainer is not None and time.time() - trainer.alive_at < 60.0
                    self._core_share = trainer.core_share if alive and trainer else 0.0
                    self._watch_trainer()
            except (OSError, SpecExtError) as error:
                self._say(str(error))
            except Exception:  # a thread that dies would leave the engine without versions
                logger.exception("vllm-spec-ext: online")

    _said: frozenset[str] = frozenset()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said |= {text}
            logger.warning("vllm-spec-ext: online: %s", text)

    def _look(self) -> None:
        """Orders first, then a new version."""
        control = read_record(self._root, Control) or Control()
        if control.frozen != self._state.frozen:
            self._set(frozen=control.frozen)
        if self._ready is not None:
            return
        if control.serial > self._state.obeyed:
            if control.serve is not None:
                self._read_ordered(control.serve, control.serial)
                return
            self._set(obeyed=control.serial)
        state = self._state
        newest = max(version_numbers(self._root), default=0)
        if state.frozen or state.trying is not None or newest <= state.handled:
            return
        try:
            self._ready = _Ready(newest, self._read(newest), None)
        except SpecExtError as error:
            self._set(handled=max(newest, self._state.handled))
            self._judge(newest, False, _refused(error), 0.0, 0.0)
            self._say(f"version {newest} is refused, {self._state.serving} goes on: {error}")

    def _read_ordered(self, number: int, serial: int) -> None:
        newest = max(version_numbers(self._root), default=0)
        self._set(handled=max(newest, self._state.handled))
        try:
            weights = self._known_or_read(number)
        except SpecExtError:
            self._set(obeyed=serial)  # it will not become readable
            raise
        self._ready = _Ready(number, weights, "it was ordered", serial)

    def _follow(self) -> None:
        """Serve what the first replica serves."""
        wanted = (read_record(self._root, EngineState) or EngineState()).serving
        if wanted == self._state.serving or self._ready is not None:
            return
        if 0 < wanted <= self._left_out:
            return
        if wanted == self._unreadable and time.monotonic() < self._read_again_at:
            return
        try:
            weights = self._known_or_read(wanted)
            self._ready = _Ready(wanted, weights, "the first replica serves it")
        except SpecExtError as error:
            # A shared file system may show it later.
            self._unreadable, self._read_again_at = wanted, time.monotonic() + _READ_AGAIN_S
            self._say(str(error))

    def _known_or_read(self, number: int) -> object:
        known = self._weights  # the engine's thread may exchange it meanwhile
        return known[number] if number in known else self._read(number)

    def _read(self, number: int) -> object:
        folder = check_version(self._root, number, self._origin.drafter)
        try:
            return self._learner.read_weights(folder)
        except SpecExtError:
            raise
        except Exception as error:  # the device may have no room for it
            raise SpecExtError(f"{folder}: {type(error).__name__}: {error}") from error

    def _watch_trainer(self) -> None:
        status = None if self._trainer is None else self._trainer.poll()
        if status is not None:
            self._say(
                f"the trainer ended (status {status}; see {self._root / TRAINER_LOG}); serving "
                f"goes on. Start another with: vllm-spec online train {self._root}"
            )

    @property
    def _num_recorded(self) -> int:
        return 0 if self._writer is None else self._writer.num_starts

    @property
    def _num_lost(self) -> int:
        if self._writer is None or self.tap is None:
            return 0
        return self._writer.num_lost + self.tap.num_dropped

    def _told(self) -> EngineState:
        return self._state.model_copy(
            update={
                "acceptance": self._trial.serving.mean,
                "acceptance_at_start": self._trial.guard.mean,
                "recorded": self._num_recorded,
                "lost": self._num_lost,
            }
        )


def _refused(error: Exception) -> str:
    kind = "" if isinstance(error, SpecExtError) else f"{type(error).__name__}: "
    return f"refused: {kind}{error}"
