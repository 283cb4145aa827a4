# SPDX-License-Identifier: Apache-2.0
"""Runs each check in a process of its own, some side by side, within a limit of time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from gpu_check.catalogue import Check
from gpu_check.report import CheckResult, Report
from vllm_spec_ext.atomic import read_json
from vllm_spec_ext.bench.engine_client import root_cause, with_cause
from vllm_spec_ext.errors import SpecExtError

ROOT = Path(__file__).resolve().parents[2]
WHOLE_LIMIT_S = 600.0
LEAST_S = 20.0  # a check that has less time left than this is not begun
MOST_AT_ONCE = 8  # each has several small engines
MIB_OF_A_CHECK = 4096  # of the GPU: its engines, and what CUDA takes for a process
POLL_S = 0.2


def environment(check: Check) -> dict[str, str]:
    """Of the process of a check, whose engines run on one of vLLM's two model runners."""
    paths = [str(ROOT / "scripts"), str(ROOT / "tests" / "engine"), os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if check.engines_inside else "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if check.runner == "v2" else "0",
        "VLLM_SPEC_EXT_STRICT": "1",  # a proposer that fails must fail the check
    }


def run_check(
    check: Check,
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    stop: threading.Event | None = None,
) -> CheckResult:
    """Start the process of a check, and wait for what it writes.

    Args:
        check: Which.
        command: Program and arguments up to the check's name, which follows with the result file.
        folder: For results and logs.
        limit_s: Seconds it may take.
        stop: Ends it, if it is set meanwhile.
    """
    result, log = folder / f"{check.name}.json", folder / f"{check.name}.log"
    result.unlink(missing_ok=True)
    program, *rest = command
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *rest[:2], check.name, str(result), *rest[2:]],
            cwd=ROOT,
            env=environment(check),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    stop, problem = stop or threading.Event(), None
    try:
        if not _ends(process, limit_s, stop):
            problem = f"not done after {limit_s:.0f} s, expected to take less"
        if stop.is_set():
            problem = "interrupted"
    finally:
        with suppress(ProcessLookupError):  # engines of a check that died, too
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    seconds = time.monotonic() - started
    if problem is None and not result.exists():
        problem = f"its process ended with status {status} and no result"
    if problem is not None:
        reason = with_cause(problem, root_cause(log.read_text(errors="replace")))
        return CheckResult(check.name, "failed", seconds, f"{reason} [log: {log.name}]")
    try:
        outcome = read_json(result)
        passed, reason, found = outcome["passed"], outcome["reason"], outcome["found"]
    except (KeyError, SpecExtError) as error:
        return CheckResult(check.name, "failed", seconds, f"its result cannot be read: {error}")
    return CheckResult(check.name, "passed" if passed else "failed", seconds, reason, found)


def _ends(process: subprocess.Popen[bytes], limit_s: float, stop: threading.Event) -> bool:
    """Wait for a process; False if the time is over or it was interrupted."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not stop.is_set():
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return True
    return False


def checks_at_once(num_cores: int, gpu_mib: int) -> int:
    """A check takes its time for starting engines, which is a core's work and more.

    Args:
        num_cores: Of this process.
        gpu_mib: Of the whole GPU.
    """
    return max(1, min(MOST_AT_ONCE, num_cores // 2, gpu_mib // MIB_OF_A_CHECK))


def child_command(folder: Path, small_model: str | None) -> list[str]:
    """What :func:`run_check` starts; each check has a folder of its own in the given one."""
    command = [sys.executable, "-m", "gpu_check.child", str(folder)]
    return [*command, small_model] if small_model else command


def run_checks(
    report: Report,
    checks: Sequence[Check],
    run: Callable[[Check, float], CheckResult],
    say: Callable[[CheckResult], None],
    *,
    at_once: int = 1,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
    whole_limit_s: float = WHOLE_LIMIT_S,
) -> Mapping[str, CheckResult]:
    """All checks; those for which no time is left are not run.

    Args:
        report: Takes every result as it comes.
        checks: Which.
        run: Runs one within so many seconds.
        say: Hears of each result.
        at_once: So many side by side; those that need the GPU for themselves one after another,
            behind the others.
        stop: Set if this is interrupted, so that checks that are running end.
        clock: Seconds.
        whole_limit_s: Of all together.
    """
    end = clock() + whole_limit_s

    def within_limit(check: Check) -> CheckResult:
        left = end - clock()
        if left < LEAST_S:
            reason = f"the {whole_limit_s:.0f} s of all checks were over (see --limit)"
            return CheckResult(check.name, "not run", reason=reason)
        return run(check, min(check.limit_s, left))

    def take(result: CheckResult) -> None:
        report.add(result)
        say(result)

    together = [check for check in checks if not check.alone]
    pool = ThreadPoolExecutor(at_once)
    try:
        for done in as_completed([pool.submit(within_limit, check) for check in together]):
            take(done.result())
    except BaseException:
        if stop is not None:
            stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    for check in checks:
        if check.alone:
            take(within_limit(check))
    return {result.name: result for result in report.results}
