# SPDX-License-Identifier: Apache-2.0
"""The engine's side without an engine: replicas that follow the first, and turns of versions."""

import errno
import fcntl
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from vllm_spec_ext.environment import READ_ONLY
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online import folder_lock
from vllm_spec_ext.online import session as session_module
from vllm_spec_ext.online.folder import (
    Control,
    EngineState,
    FolderFacts,
    read_record,
    write_record,
)
from vllm_spec_ext.online.session import OnlineSession, Origin
from vllm_spec_ext.online.versions import drafter_hash, version_folder, write_version
from vllm_spec_ext.options import OnlineOptions
from vllm_spec_ext.proposers.base import Draft, RequestStep, StepOutcome

NAME = "weights"


class Learner:
    """Its weights are what the file says."""

    def __init__(self, steps_a_turn: int = 1) -> None:
        self.steps_a_turn = steps_a_turn
        self.used: list[bytes] = []

    def read_weights(self, folder: Path) -> object:
        found = (folder / NAME).read_bytes()
        if found == b"other shape":
            raise SpecExtError("another shape")
        if found == b"no room to read":
            raise RuntimeError("out of memory")
        return found

    def use_weights(self, weights: object) -> None:
        assert isinstance(weights, bytes)
        if weights == b"no room to use":
            raise RuntimeError("out of memory")
        self.used.append(weights)


Start = Callable[..., tuple[OnlineSession, Learner]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Sessions on one folder; ended with the test."""
    own = tmp_path / "own"
    own.mkdir()
    (own / NAME).write_bytes(b"own")
    made: list[OnlineSession] = []

    def begin(*, is_first: bool, steps_a_turn: int = 1, fresh: bool = False, **more: Any) -> Any:
        options = {"folder": str(tmp_path / "online"), "guard": 0.0, **more}
        origin = Origin("blockwise", "toy", 10, own, lambda: {NAME: b"own"})
        learner = Learner(steps_a_turn)
        given = OnlineOptions.model_validate(options)
        made.append(OnlineSession(given, origin, learner, is_first=is_first, fresh=fresh))
        return made[-1], learner

    yield begin
    for session in made:
        session.close()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def cannot_read(session: OnlineSession, number: int) -> bool:
    return session._unreadable == number


def says(root: Path, number: int) -> bool:
    state = read_record(root, EngineState)
    return state is not None and state.serving == number


def has_ready(session: OnlineSession, number: int) -> bool:
    return session._ready is not None and session._ready.number == number


def publish(root: Path, number: int, data: bytes) -> None:
    write_version(root, number, {NAME: data}, drafter_hash({NAME: b"own"}))


def test_a_folder_without_its_record_is_gone_on_with(start: Start, tmp_path: Path) -> None:
    """All that a server makes in it is known as its own."""
    root = tmp_path / "online"
    start(is_first=True, start_trainer=True)[0].close()
    assert {path.name for path in root.iterdir()} > {"versions", "engine.json", "trainer.log"}
    (root / "online.json").unlink()
    session, learner = start(is_first=True)
    assert (session.state.serving, learner.used) == (0, [b"own"])


def test_a_folder_of_something_else_stays_as_it_is(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "online"
    root.mkdir()
    (root / "report.txt").touch()
    for is_first in (True, False):
        with pytest.raises(SpecExtError, match=r"found report\.txt"):
            start(is_first=is_first)
    assert [path.name for path in root.iterdir()] == ["report.txt"]


def test_a_replica_serves_what_the_first_serves(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "online"
    follower, learner = start(is_first=False)  # it may well be there before the first
    assert not root.exists()
    first, _ = start(is_first=True)
    publish(root, 1, b"one")
    time.sleep(0.6)  # two looks: what nobody serves is not tried
    follower.begin_step()
    assert learner.used == [b"own"]
    write_record(root, EngineState(serving=1))
    until(lambda: follower._ready is not None)
    follower.begin_step()
    assert learner.used == [b"own", b"one"]
    assert follower.state.serving == 1
    write_record(root, EngineState(serving=0))  # rolled back
    until(lambda: follower._ready is not None)
    follower.begin_step()
    assert learner.used == [b"own", b"one", b"own"]
    assert follower.tap is None
    first.close()


def test_a_trial_that_a_restart_ended_is_made_again(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "online"
    session, _ = start(is_first=True)
    publish(root, 1, b"one")
    until(lambda: session._ready is not None)
    session.begin_step()
    assert session.state.trying == 1
    session.close()
    again, _ = start(is_first=True)
    until(lambda: again._ready is not None)
    again.begin_step()
    assert again.state.trying == 1


def test_weights_of_refused_versions_are_let_go(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "online"
    session, learner = start(is_first=True, trial_steps=40)
    for number in (1, 2, 3):
        publish(root, number, b"version %d" % number)
        until(lambda: session._ready is not None)
        session.begin_step()
        assert session.state.trying == number
        for index in range(60):
            session._trial.count("serving", 2 + index % 2)
            session._trial.count("trial", index % 2)
        session.begin_step()
        session.begin_step()
        assert session.state.trying is None
        assert session._weights.keys() == {0}
    assert learner.used[-1] == b"own"


def test_a_replica_writes_nothing(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "online"
    first, _ = start(is_first=True)
    first.close()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    follower, _ = start(is_first=False, start_trainer=True)
    follower.begin_step()
    time.sleep(0.3)
    follower.flush()
    follower.close()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert follower._trainer is None


def test_a_replica_does_not_decide(start: Start, tmp_path: Path) -> None:
    """The weights of the start come back when the first replica says so, and no sooner."""
    root = tmp_path / "online"
    start(is_first=True)[0].close()
    publish(root, 1, b"one")
    write_record(root, EngineState(serving=1))
    follower, learner = start(is_first=False, guard=0.5)
    assert learner.used == [b"one"]
    for _ in range(200):
        follower._trial.count("guard", 4)
        follower._trial.count("serving", 0)
        follower.begin_step()
    assert follower.state.serving == 1
    assert learner.used == [b"one"]  # nor does it spend steps on finding out


def test_a_version_that_a_replica_cannot_read(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "online"
    start(is_first=True)[0].close()
    follower, learner = start(is_first=False)
    publish(root, 1, b"other shape")
    publish(root, 2, b"two")
    (version_folder(root, 2) / NAME).write_bytes(b"damaged")
    for number in (1, 2):
        write_record(root, EngineState(serving=number))
        until(partial(cannot_read, follower, number))
        follower.begin_step()
    publish(root, 3, b"three")
    write_record(root, EngineState(serving=3))
    until(lambda: follower._ready is not None)
    follower.begin_step()
    assert learner.used == [b"own", b"three"]


def test_a_version_that_could_not_be_read_is_looked_at_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of several machines may show it later."""
    monkeypatch.setattr(session_module, "_READ_AGAIN_S", 0.5)
    root = tmp_path / "online"
    first, _ = start(is_first=True)
    first.close()  # so that it says nothing in between
    follower, learner = start(is_first=False)
    write_record(root, EngineState(serving=1))
    until(lambda: cannot_read(follower, 1))
    publish(root, 1, b"one")
    until(lambda: follower._ready is not None)
    follower.begin_step()
    assert learner.used == [b"own", b"one"]


@pytest.mark.parametrize("data", [b"no room to read", b"no room to use"])
def test_a_version_that_the_device_has_no_room_for_is_refused_once(
    data: bytes, start: Start, tmp_path: Path
) -> None:
    root = tmp_path / "online"
    session, learner = start(is_first=True, trial_steps=40)
    publish(root, 1, data)
    if data == b"no room to use":
        until(lambda: session._ready is not None)
    else:
        until(lambda: len(session.state.verdicts) > 0)
    for _ in range(5):
        session.begin_step()
    assert session.state.trying is None
    (verdict,) = session.state.verdicts
    assert (verdict.version, verdict.kept) == (1, False)
    assert "refused" in verdict.reason
    assert "RuntimeError: out of memory" in verdict.reason
    assert learner.used[-1] == b"own"
    publish(root, 2, b"two")  # goes on
    until(lambda: session._ready is not None)
    session.begin_step()
    assert session.state.trying == 2
    time.sleep(0.6)  # two looks
    assert len(session.state.verdicts) == 1


def test_a_version_in_use_that_cannot_be_used_any_more(start: Start, tmp_path: Path) -> None:
    """It drafted before a trial, and the device has no room left to go back to it."""
    root = tmp_path / "online"
    session, learner = start(is_first=True, trial_steps=40)
    publish(root, 1, b"one")
    until(lambda: session._ready is not None)
    session.begin_step()
    session._serve(1, "it was better")
    session.begin_step()
    assert learner.used[-1] == b"one"
    session._use(0)
    session._weights[1] = b"no room to use"
    session.begin_step()
    assert session.state.serving == 0
    assert learner.used[-1] == b"own"
    session.begin_step()
    assert [(one.version, one.kept) for one in session.state.verdicts] == [(1, False)]


def test_two_servers_on_a_folder(start: Start, tmp_path: Path) -> None:
    """The second one follows, and takes over once the first has ended."""
    root = tmp_path / "online"
    first, _ = start(is_first=True)
    second, learner = start(is_first=True)
    assert second.tap is None
    publish(root, 1, b"one")
    until(lambda: first._ready is not None)
    first.begin_step()
    first._serve(1, "it was better")
    first._judge(1, True, "it was better", 1.0, 2.0)
    first.close()
    until(lambda: second._ready is not None)
    second.begin_step()
    assert learner.used == [b"own", b"one"]
    until(lambda: second._offered is not None)
    second.begin_step()
    assert second.tap is not None
    second.close()
    state = read_record(root, EngineState)
    assert state is not None
    assert (state.serving, state.handled, state.served) == (1, 1, (1,))
    assert [verdict.version for verdict in state.verdicts] == [1]


def test_a_server_without_requests_takes_over_what_was_learned(
    start: Start, tmp_path: Path
) -> None:
    """When its requests come; until then another one may."""
    root = tmp_path / "online"
    first, _ = start(is_first=True)
    idle, learner = start(is_first=True, guard=0.5)
    for number in (1, 2):
        publish(root, number, b"%d" % number)
        until(partial(has_ready, first, number))
        first.begin_step()
        first._serve(number, "it was better")
        until(partial(says, root, number))
        time.sleep(0.6)  # the other one has seen it
    first.close()
    time.sleep(2.5)
    assert idle.tap is None
    for _ in range(3000):  # traffic that the other weights will not see
        idle._trial.count("serving", 0)
    idle.begin_step()
    until(lambda: idle._offered is not None)
    idle.begin_step()
    assert idle.tap is not None
    assert (idle.state.serving, idle.state.handled, learner.used[-1]) == (2, 2, b"2")
    assert idle._trial.serving.count == 0  # as the guard's: both from now on
    idle.close()
    state = read_record(root, EngineState)
    assert state is not None
    assert state.serving == 2


def test_a_server_whose_requests_ended_leaves_the_folder_to_others(start: Start) -> None:
    """It had one a moment ago, and took the folder to decide about it."""
    first, _ = start(is_first=True)
    idle, _ = start(is_first=True)
    busy, _ = start(is_first=True)
    idle.begin_step()
    first.close()
    until(lambda: idle._offered is not None)

    def is_taken() -> bool:
        busy.begin_step()
        return busy.tap is not None

    until(is_taken)
    idle.begin_step()
    assert idle.tap is None


def test_an_order_to_an_idle_server_outlives_it(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "online"
    server, _ = start(is_first=True)
    publish(root, 1, b"one")
    until(lambda: server._ready is not None)
    server.begin_step()
    server._serve(1, "it was better")
    write_record(root, Control(serial=1, serve=0))
    until(lambda: server._ready is not None)
    server.close()
    state = read_record(root, EngineState)
    assert state is not None
    assert (state.serving, state.obeyed) == (1, 0)
    again, learner = start(is_first=True)
    until(lambda: again._ready is not None)
    again.begin_step()
    assert (again.state.serving, again.state.obeyed, learner.used[-1]) == (0, 1, b"own")


def test_an_order_that_cannot_be_obeyed_is_said_once(start: Start, tmp_path: Path) -> None:
    server, _ = start(is_first=True)
    write_record(tmp_path / "online", Control(serial=1, serve=7))
    until(lambda: server.state.obeyed == 1)
    assert server._ready is None


def test_the_trainer_is_not_bound_to_the_engines_cores(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM binds a CPU worker to the cores that it computes on, by its environment, too."""
    own, found = os.sched_getaffinity(0), dict[str, Any]()

    def popen(command: list[str], **given: Any) -> Any:
        found.update(env=given["env"], cores=os.sched_getaffinity(0), command=command)
        return SimpleNamespace(
            poll=lambda: None, terminate=lambda: None, wait=lambda timeout: 0, pid=1
        )

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setenv("OMP_PLACES", "{0}")
    monkeypatch.setenv("OF_THE_USER", "1")
    bound = {min(own)}
    os.sched_setaffinity(0, bound)
    try:
        start(is_first=True, start_trainer=True)
        assert os.sched_getaffinity(0) == bound
    finally:
        os.sched_setaffinity(0, own)
    assert found["cores"] >= os.sched_getaffinity(os.getppid())
    assert "OMP_PLACES" not in found["env"]
    assert found["env"]["OF_THE_USER"] == "1"


def test_a_server_that_does_not_start_leaves_the_folder_to_others(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> object:
        raise SpecExtError("another shape")

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "read_weights", fail)
        with pytest.raises(SpecExtError, match="another shape"):
            start(is_first=True)
    assert start(is_first=True)[0].tap is not None


def test_a_damaged_copy_of_the_drafter_is_read_elsewhere(start: Start, tmp_path: Path) -> None:
    start(is_first=True)[0].close()
    (version_folder(tmp_path / "online", 0) / NAME).write_bytes(b"damaged")
    assert start(is_first=True)[1].used == [b"own"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(
    number: int, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folder_lock, "logger", logging.getLogger("plain"))
    monkeypatch.setattr(fcntl, "flock", flock)
    assert start(is_first=True)[0].tap is not None
    assert "knows no locks" in caplog.text


def test_a_lock_that_was_released_is_not_taken_again(tmp_path: Path) -> None:
    """A thread that still reads a version would take it for a server that has ended."""
    lock = folder_lock.FolderLock(tmp_path / "lock")
    assert lock.take()
    lock.release()
    assert not lock.take()


def test_versions_that_were_kept_are_remembered(start: Start, tmp_path: Path) -> None:
    """For a rollback; what was served after the version that is returned to is not."""
    root = tmp_path / "online"
    session, _ = start(is_first=True)
    for number in (2, 5, 9):
        publish(root, number, b"x")
        session._weights[number] = b"x"
        session._serve(number, "it was better")
    session._serve(5, "it was ordered")
    assert session.state.served == (2, 5)


def test_the_drafters_own_file_may_be_written_over(start: Start, tmp_path: Path) -> None:
    """It is mapped where it is large; the folder's copy of it is what versions return to."""
    start(is_first=True)[0].close()
    (tmp_path / "own" / NAME).write_bytes(b"new")
    session, learner = start(is_first=True)
    session.begin_step()
    assert learner.used == [b"own"]


def test_a_full_disk_does_not_keep_a_server_from_starting(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(is_first=True)[0].close()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    session, _ = start(is_first=True, learning_rate=1e-5)
    assert session.tap is not None


def test_turns(start: Start, tmp_path: Path) -> None:
    """A version drafts some steps in a row, and ends at once when what is served changes."""
    root = tmp_path / "online"
    session, learner = start(is_first=True, steps_a_turn=10, seed=3)
    publish(root, 1, b"one")
    until(lambda: session._ready is not None)
    roles = []
    for _ in range(400):
        session.begin_step()
        roles.append(session._role)
    turns = [roles[step : step + 10] for step in range(0, 400, 10)]
    assert all(len(set(turn)) == 1 for turn in turns)
    assert 10 < sum(turn[0] == "trial" for turn in turns) < 30
    assert len(learner.used) < 40
    while session._role != "trial":
        session.begin_step()
    session._set(frozen=True)
    session.begin_step()
    assert session._role == "serving"
    assert learner.used[-1] == b"own"


def step(session: OnlineSession, accepted: int) -> str:
    """One step of one request, and the role that drafted it."""
    request = SimpleNamespace(request_id="a", room=9)
    session.begin_step()
    session.drafted([cast(RequestStep, request)], [Draft(np.array([1, 2], np.int32))])
    role = session._role
    session.verified([StepOutcome("a", 2, accepted)])
    return role


def hold(session: OnlineSession) -> None:
    """Let its thread change nothing more."""
    session._stop.set()
    session._thread.join()


def test_what_is_served_while_frozen_is_not_compared(start: Start, tmp_path: Path) -> None:
    """The version on trial does not draft then, so the two would be judged on other requests."""
    session, _ = start(is_first=True)
    publish(tmp_path / "online", 1, b"one")
    until(lambda: session._ready is not None)
    for _ in range(100):
        step(session, 1)
    before = session._trial._before.count
    assert before + session._trial._after.count == 100
    write_record(tmp_path / "online", Control(frozen=True))
    until(lambda: session.state.frozen)
    assert {step(session, 2) for _ in range(200)} == {"serving"}
    assert (session._trial._before.count, session._trial._before.mean) == (before, 1.0)
    assert session._trial.serving.count == before + 200  # what it is in use for is still shown
    write_record(tmp_path / "online", Control(serial=1))
    until(lambda: not session.state.frozen)
    for _ in range(100):
        step(session, 1)
    assert session._trial._before.count + session._trial._after.count == 200
    assert session._trial._before.mean == session._trial._after.mean == 1.0


def test_a_draft_counts_as_of_the_step_that_made_it(start: Start, tmp_path: Path) -> None:
    """Its outcome comes when learning may have been frozen, or go on."""
    session, _ = start(is_first=True)
    publish(tmp_path / "online", 1, b"one")
    until(lambda: session._ready is not None)
    session.begin_step()
    hold(session)
    request = SimpleNamespace(request_id="a", room=9)
    for frozen in (True, False):
        before = session._trial._before.count + session._trial._after.count
        session._set(frozen=frozen)
        session.begin_step()
        session.drafted([cast(RequestStep, request)], [Draft(np.array([1, 2], np.int32))])
        session._set(frozen=not frozen)
        session.verified([StepOutcome("a", 2, 1)])
        after = session._trial._before.count + session._trial._after.count
        assert after - before == (not frozen)


def test_a_turn_ends_when_learning_is_frozen_and_when_it_goes_on(
    start: Start, tmp_path: Path
) -> None:
    """A turn of the version in use that began while frozen would count for nothing but it."""
    session, _ = start(is_first=True, steps_a_turn=1000)
    publish(tmp_path / "online", 1, b"one")
    until(lambda: session._ready is not None)
    session.begin_step()
    hold(session)
    roles = set()
    for _ in range(20):
        session._set(frozen=True)
        assert step(session, 1) == "serving"
        session._set(frozen=False)
        roles.add(step(session, 1))
    assert roles == {"serving", "trial"}


def test_a_replica_that_was_reset_takes_up_what_is_learned_from_then_on(
    start: Start, tmp_path: Path
) -> None:
    root = tmp_path / "online"
    start(is_first=True)[0].close()
    publish(root, 1, b"one")
    write_record(root, EngineState(serving=1))  # the first replica is reset a moment later
    follower, learner = start(is_first=False, fresh=True)
    time.sleep(0.6)  # two looks
    follower.begin_step()
    assert (follower.state.serving, learner.used) == (0, [b"own"])
    publish(root, 2, b"two")
    write_record(root, EngineState(serving=2))
    until(lambda: follower._ready is not None)
    follower.begin_step()
    assert (follower.state.serving, learner.used) == (2, [b"own", b"two"])


def test_a_benchmarks_engine_that_was_reset_keeps_the_weights_of_the_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reset between passes; what was learned says itself anew at once."""
    monkeypatch.setenv(READ_ONLY, "1")
    root = tmp_path / "online"
    start(is_first=True)[0].close()
    publish(root, 1, b"one")
    write_record(root, EngineState(serving=1))
    follower, learner = start(is_first=False, fresh=True)
    time.sleep(0.6)  # two looks
    follower.begin_step()
    publish(root, 2, b"two")
    write_record(root, EngineState(serving=2))
    time.sleep(0.6)
    follower.begin_step()
    assert (follower.state.serving, learner.used) == (0, [b"own"])


def test_a_server_that_was_reset_takes_over_with_the_weights_of_the_start(
    start: Start, tmp_path: Path
) -> None:
    root = tmp_path / "online"
    first, _ = start(is_first=True)
    second, learner = start(is_first=True, fresh=True)
    publish(root, 1, b"one")
    until(partial(has_ready, first, 1))
    first.begin_step()
    first._serve(1, "it was better")
    until(partial(says, root, 1))
    first.close()
    second.begin_step()
    until(lambda: second._offered is not None)
    second.begin_step()
    assert second.tap is not None
    time.sleep(0.6)
    second.begin_step()
    assert (second.state.serving, second.state.trying, learner.used) == (0, None, [b"own"])


def test_a_record_that_cannot_be_read_is_not_called_damaged(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be whole, and tells what is served and what was obeyed: nobody should delete it."""
    root = tmp_path / "online"
    start(is_first=True)[0].close()

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(SpecExtError, match=r"engine.json cannot be read: Permission") as found:
            read_record(root, EngineState)
    assert "delete" not in str(found.value)
    (root / "engine.json").write_text("{")
    with pytest.raises(SpecExtError, match=r"(?s)engine.json is damaged, or .*delete it"):
        read_record(root, EngineState)


def test_the_folder_says_whose_it_is(start: Start, tmp_path: Path) -> None:
    start(is_first=True)
    facts = read_record(tmp_path / "online", FolderFacts)
    assert facts is not None
    assert (facts.method, facts.target) == ("blockwise", "toy")
