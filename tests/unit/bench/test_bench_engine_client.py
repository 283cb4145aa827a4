# SPDX-License-Identifier: Apache-2.0
"""The engine's process without an engine: failures, pausing, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spec_ext.bench import engine_client, group_work
from vllm_spec_ext.bench.engine_client import EngineClient, EngineFailed, root_cause, with_cause
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.vllm_engine import Sampling
from vllm_spec_ext.bench.worker_extension import RivalWorker
from vllm_spec_ext.errors import SpecExtError

linux_only = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def _state(pid: int) -> str:
    """One letter of the kernel's: S sleeping, T stopped, ...; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_a_command_before_the_engine_is_refused(tmp_path: Path) -> None:
    with EngineClient("x", tmp_path / "x.log") as client:
        with pytest.raises(SpecExtError, match="was not started") as caught:
            client.run([0], 1)
        assert not isinstance(caught.value, EngineFailed)


def test_a_dead_process_is_reported_with_the_cause_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with EngineClient("x", log) as client:
        with log.open("a") as file:
            file.write("torch.OutOfMemoryError: no room\n")
        os.kill(client.process.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"status -9 \(cause: torch.OutOfMemoryError: no r"):
            client.run([0], 1)


def test_our_method_without_the_installed_plugin_says_so(
    tmp_path: Path,
) -> None:
    code = (
        "import importlib.metadata as m; m.entry_points = lambda group: []\n"
        "from vllm_spec_ext.bench.methods import parse_method\n"
        "from vllm_spec_ext.bench.vllm_engine import Sampling, VllmEngine\n"
        "VllmEngine('m', parse_method('input_copy'), {}, Sampling(1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=800
    )
    assert "entry point 'spec_ext' of vllm-spec-ext is not installed here" in done.stderr


@linux_only
def test_a_paused_engine_is_stopped_and_wakes_for_a_command(tmp_path: Path) -> None:
    with EngineClient("x", tmp_path / "x.log") as client:
        client.pause()
        _wait_for(lambda: _state(client.process.pid) == "T")
        with pytest.raises(SpecExtError, match="was not started"):
            client.run([0], 1)
        assert not client.paused
        client.pause()
    assert _state(client.process.pid) == ""


CHILD_IN_TURNS = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
command, (indices, concurrency, stream, fresh, turn) = pipe.recv()
assert (command, indices, concurrency, stream, fresh, turn) == ("run", [0, 1], 2, False, True, 1)
pipe.send(("progress", 0))
pipe.send(("turn", None))
if pipe.recv() == ("go_on", ()):
    pipe.send(("progress", 1))
    pipe.send(("ok", "the run"))
    pipe.recv()
"""


@pytest.fixture
def child_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineClient:
    """An engine's process with a pass of two turns."""
    (tmp_path / "child_in_turns.py").write_text(CHILD_IN_TURNS)
    monkeypatch.setattr(engine_client, "CHILD_MODULE", "child_in_turns")
    return EngineClient("x", tmp_path / "x.log", {"PYTHONPATH": str(tmp_path)})


@linux_only
def test_an_engine_waits_stopped_between_its_turns(child_in_turns: EngineClient) -> None:
    answered: list[int] = []
    with child_in_turns as client:
        turns = client.run_in_turns([0, 1], 2, 1, answered.append)
        assert next(turns) is None
        assert answered == [0]
        client.pause()
        _wait_for(lambda: _state(client.process.pid) == "T")
        assert next(turns) == "the run"
        assert answered == [0, 1]
    assert client.process.returncode == 0


def test_an_engine_can_be_closed_between_its_turns(child_in_turns: EngineClient) -> None:
    assert next(child_in_turns.run_in_turns([0, 1], 2, 1)) is None
    child_in_turns.pause()
    child_in_turns.close()
    assert child_in_turns.process.returncode == 0


CHILD_THAT_SAYS_LITTLE = """
import sys, time
from multiprocessing.connection import Connection
from pathlib import Path
pipe = Connection(int(sys.argv[1]))
command, arguments = pipe.recv()
until = time.monotonic() + 2.5
while arguments[0] == ["computes"] and time.monotonic() < until:
    pass
while arguments[0] == ["writes"] and time.monotonic() < until:
    Path("written").write_bytes(b"x" * (1 << 20))
    time.sleep(0.05)
while arguments[0] == ["steps"] and time.monotonic() < until:
    pipe.send(("alive", None))
    time.sleep(0.05)
while arguments[0] == ["loops"]:
    pass
while arguments[0] == ["hangs"]:
    time.sleep(0.05)
for index in range(3):
    pipe.send(("progress", index))
pipe.send(("ok", "the run"))
pipe.recv()
"""


@pytest.fixture
def quiet_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineClient]:
    """An engine's process whose parent takes silence for death after a second, not 15 minutes."""
    (tmp_path / "quiet_child.py").write_text(CHILD_THAT_SAYS_LITTLE)
    monkeypatch.setattr(engine_client, "CHILD_MODULE", "quiet_child")
    monkeypatch.setattr(engine_client, "SILENCE_S", 1.0)
    monkeypatch.setattr(engine_client, "LOOK_S", 0.5)
    monkeypatch.chdir(tmp_path)
    with EngineClient("x", tmp_path / "x.log", {"PYTHONPATH": str(tmp_path)}) as client:
        assert not client.pipe.poll(0.1)
        yield client


@pytest.mark.parametrize("way", ["computes", "writes", "steps"])
def test_an_engine_at_work_is_not_dead(
    way: Any, quiet_child: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "writes":  # that alone must do
        monkeypatch.setattr(group_work, "LEAST_CORE", 10.0)
    assert quiet_child.run([way], 1) == "the run"
    assert not quiet_child.busy


def test_an_engine_that_hangs_is(quiet_child: EngineClient) -> None:
    hangs: Any = ["hangs"]
    with pytest.raises(EngineFailed, match=r"no sign of life for \d+ s: no step, and less than"):
        quiet_child.run(hangs, 1)


def test_an_endless_loop_is_not_waited_for_without_end(
    quiet_child: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "STEP_S", 1.5)
    # Where other tests have the cores, half a second may go by without a hundredth of it.
    monkeypatch.setattr(engine_client, "SILENCE_S", 6.0)
    loops: Any = ["loops"]
    with pytest.raises(
        EngineFailed, match=r"at work, but took no step for \d+ s, expected one in 2"
    ):
        quiet_child.run(loops, 1)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError()])
def test_a_display_that_fails_is_no_failure_of_the_engine(
    error: OSError, quiet_child: EngineClient
) -> None:
    """The process lives on, so waiting for its end would take for ever."""

    def display(index: int) -> None:
        raise error

    # Where it is waited for after all, this ends it, and the wrong error comes.
    deadline = Timer(60.0, quiet_child.process.kill)
    deadline.start()
    with pytest.raises(type(error)) as caught:
        quiet_child.run([0], 1, display)
    deadline.cancel()
    assert caught.value is error
    assert quiet_child.process.poll() is None


def test_a_process_at_work_is_ended_by_sigterm(tmp_path: Path) -> None:
    client = EngineClient("x", tmp_path / "x.log")
    with pytest.raises(SpecExtError):
        client.run([0], 1)  # its handler is installed by now
    client.busy = True  # as after Ctrl-C in the middle of a pass
    client.close()
    assert client.process.returncode == 128 + signal.SIGTERM


@linux_only
@pytest.mark.parametrize("stopped", [True, False])
def test_an_engine_and_its_children_end_with_a_killed_benchmark(
    tmp_path: Path, stopped: bool
) -> None:
    # The engine's process has a child here, as vLLM's has: none may stay behind, stopped for ever.
    code = f"""
import os, signal, sys, time
from pathlib import Path
from vllm_spec_ext.bench import engine_client
os.environ["PYTHONPATH"] = {str(tmp_path)!r} + os.pathsep + os.environ.get("PYTHONPATH", "")
engine_client.CHILD_MODULE = "child_with_child"
client = engine_client.EngineClient("x", Path({str(tmp_path / "x.log")!r}))
pids = client.pipe.recv()
if {stopped}:
    client.pause()
    time.sleep(0.2)
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "child_with_child.py").write_text(
        "import signal, subprocess, sys, os, time\n"
        "from multiprocessing.connection import Connection\n"
        "from vllm_spec_ext.bench.watchdog import watch\n"
        "watch(int(sys.argv[2]))\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "signal.signal(signal.SIGTERM, lambda n, f: (child.kill(), sys.exit()))\n"
        "Connection(int(sys.argv[1])).send((os.getpid(), child.pid))\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=800,
        env=env,
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    _wait_for(lambda: all(_state(pid) in ("", "Z") for pid in pids))


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("all fine\n", None),
        (
            "INFO ready\n(EngineCore pid=1) ValueError: too long\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: too long",
        ),
        ("RuntimeError: Engine core initialization failed.\n", None),
        ("ERROR 11-21 [core.py:1] torch.OutOfMemoryError: x\n", "torch.OutOfMemoryError: x"),
    ],
)
def test_root_cause_skips_mere_consequences(log: str, expected: str | None) -> None:
    assert root_cause(log) == expected


def test_messages_are_one_line_of_bearable_length() -> None:
    assert with_cause("a\n  b", None) == "a b"
    assert with_cause("X: y", "pkg.X: y") == "X: y"
    assert with_cause("lost", "pkg.X: y") == "lost (cause: pkg.X: y)"
    assert len(with_cause("long " * 1000, None)) == 500


def test_the_rivals_memory_is_replaced_by_an_empty_one_of_the_same_size() -> None:
    class Cache:
        def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
            self.max_tree_depth, self.max_cached_requests = max_tree_depth, max_cached_requests

    worker = RivalWorker()
    worker.model_runner = SimpleNamespace(drafter=SimpleNamespace(suffix_cache=Cache(24, 100)))
    old = worker.model_runner.drafter.suffix_cache
    assert worker.spec_bench_forget()
    new = worker.model_runner.drafter.suffix_cache
    assert new is not old
    assert (new.max_tree_depth, new.max_cached_requests) == (24, 100)
    worker.model_runner = SimpleNamespace(drafter=object())
    assert not worker.spec_bench_forget()


def test_settings_that_a_method_refuses_are_its_own_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineClient("x", tmp_path / "x.log") as client:

        def refuse(*arguments: object, **options: object) -> None:
            raise SpecExtError("bad option")

        monkeypatch.setattr(client, "_ask", refuse)
        with pytest.raises(EngineFailed, match="bad option"):
            client.start("m", Method("x", {"method": "x"}), {}, Sampling(1))
