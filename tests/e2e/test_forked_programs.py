# SPDX-License-Identifier: Apache-2.0
"""Programs that are forked behave as programs that are started."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_programs import VARIABLES, ForkedProcess, Forks

PROGRAM = """
import atexit, os, sys, threading, time
print(__name__, sys.argv[1:], os.environ["OF_IT"], os.getcwd(), sys.stdin.read())
print("to err", file=sys.stderr)
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.1), print("from a thread"))).start()
import beside
{}
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", params=["forked", "started"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    if request.param == "forked":
        forks = Forks(imported=["json"])
        yield forks.run
        forks.close()
    else:

        def start(
            words: list[str], env: dict[str, str], *, given: str = "", timeout: float, cwd: Path
        ) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, *words],
                env=env,
                cwd=cwd,
                input=given,
                timeout=timeout,
                capture_output=True,
                text=True,
                check=False,
            )

        yield start


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
@pytest.mark.parametrize("how", ["script", "module"])
def test_a_program(how: str, end: str, status: int, words: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(end))
    done = run(
        [*(["-m", "program"] if how == "module" else [str(script)]), "a", "b c"],
        {**os.environ, "OF_IT": "mine"},
        cwd=tmp_path,
        given="given",
        timeout=20,
    )
    assert done.returncode == status
    first = f"__main__ ['a', 'b c'] mine {tmp_path} given"
    assert done.stdout.splitlines() == [first, "from a thread", "at the end"]
    assert done.stderr.startswith("to err\n")
    assert done.stderr.endswith(words)


def test_one_that_takes_too_long_is_killed(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        run([str(script)], dict(os.environ), cwd=tmp_path, timeout=2)
    pid, end = int((tmp_path / "pid").read_text()), time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


ENGINES = """
import json, os, sys, time
from pathlib import Path
from vllm_spec_ext.bench.engine_client import EngineClient, EngineFailed, subprocess

found = [subprocess.Popen.__name__]
for number in range(2):
    with EngineClient("plain", Path(f"{number}.log"), {"OF_IT": "engines"}) as client:
        group = os.getpgid(client.process.pid) == client.process.pid
        try:
            client.answers([0], 1)
        except Exception as error:
            found += [group, str(error)]
        client.pause()
        time.sleep(0.1)
    found.append(client.process.returncode)
json.dump(found, sys.stdout)
"""


def test_engine_processes_are_forked(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(ENGINES)
    forks = Forks(imported=["vllm_spec_ext.plugin"])
    done = forks.run([str(script)], {**os.environ, **VARIABLES}, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    one = [True, "the engine was not started", 0]
    assert json.loads(done.stdout) == [ForkedProcess.__name__, *one, *one]
    forks.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(forks.process.pid, signal.SIGTERM)
