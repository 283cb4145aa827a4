# SPDX-License-Identifier: Apache-2.0
"""Programs that start with vLLM imported, because they are forked from a process that imported it.

Importing vLLM takes seven seconds, in each program of a test and once more in each engine process
of the benchmark. :func:`run_forked` is ``subprocess.run`` for programs of which a test does not ask
how they start. A program has its own arguments, folder, variables and output; those of
:data:`VARIABLES` are the same for all, since libraries read them when they are imported. Engine
processes of the benchmark are forked from the program; others it must not start.
"""

import atexit
import contextlib
import gc
import importlib
import itertools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",  # threads of a program are not there in what is forked from it
}
IMPORTED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm_spec_ext.plugin",
)


class Forks:
    """The process with the imports; ends with this one, or when a program takes too long."""

    def __init__(self, imported: Sequence[str] = IMPORTED) -> None:
        self.connection, other = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(other.fileno()), *imported],
            env={**os.environ, **VARIABLES},
            pass_fds=[other.fileno()],
            start_new_session=True,  # ends as one with the programs
        )
        other.close()
        atexit.register(self.close)

    def run(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: Path | str | None = None,
        given: str = "",
        timeout: float,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python`` with these arguments (``-m name ...`` or ``script ...``).

        Raises:
            subprocess.TimeoutExpired: It took longer, and was killed.
        """
        with tempfile.TemporaryDirectory(prefix="forked-") as name:
            files = [Path(name) / stream for stream in ("in", "out", "err")]
            files[0].write_text(given)
            folder = str(cwd or Path.cwd())
            self.connection.send((list(words), dict(env), folder, list(map(str, files))))
            if not self.connection.poll(timeout):
                self.close()
                raise subprocess.TimeoutExpired(list(words), timeout)
            status = self.connection.recv()
            out, err = (file.read_text(errors="replace") for file in files[1:])
        return subprocess.CompletedProcess(list(words), status, out, err)

    def close(self) -> None:
        """End it, and the program that runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def alive(self) -> bool:
        """Whether it can run programs."""
        return self.process.poll() is None


@cache
def _latest() -> list[Forks]:
    return []


def run_forked(
    words: Sequence[str], env: Mapping[str, str], **more: Any
) -> subprocess.CompletedProcess[str]:
    """As :meth:`Forks.run`, on one process for the whole test session."""
    forks = _latest()
    if not (forks and forks[-1].alive):
        forks.append(Forks())
    return forks[-1].run(words, {**env, **VARIABLES}, **more)


class ForkedProcess:
    """What the benchmark's ``EngineClient`` asks of a ``subprocess.Popen``, without an exec."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdout: IO[bytes],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        process_group: int,
        **_: object,
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        with contextlib.suppress(OSError):  # by both, so that it is so whoever is first
            os.setpgid(self.pid, process_group)
        if self.pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream in (1, 2):
                os.dup2(stdout.fileno(), stream)
            kept = [2, *sorted(pass_fds), os.sysconf("SC_OPEN_MAX")]
            for before, after in itertools.pairwise(kept):
                os.closerange(before + 1, after)
            _become(words[1:], env)

    def poll(self) -> int | None:
        """Its status, if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Its status, once it has ended."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("engine", timeout)
            time.sleep(0.02)
        return status

    def terminate(self) -> None:
        """Ask it to end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _become(words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Go on as the program; its exit takes nothing apart."""
    os.environ.clear()
    os.environ.update(env)
    status: Any = 0
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path[0] = os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def main() -> None:
    """Import, then fork a program at a time until nobody asks."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if "vllm_spec_ext.plugin" in sys.modules:
        from vllm_spec_ext.bench import engine_client

        engine_client.subprocess = SimpleNamespace(  # type: ignore[assignment]
            **{**vars(subprocess), "Popen": ForkedProcess}
        )
    gc.freeze()
    while True:
        try:
            words, env, folder, files = connection.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            connection.close()
            for number, (file, how) in enumerate(zip(files, ("rb", "wb", "wb"), strict=True)):
                with Path(file).open(how) as opened:
                    os.dup2(opened.fileno(), number)
            os.chdir(folder)
            _become(words, env)
        _, status = os.waitpid(child, 0)
        connection.send(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
