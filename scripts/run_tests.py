# SPDX-License-Identifier: Apache-2.0
"""Run all tests: ``make test`` and continuous integration call this.

Each part is a pytest process of its own, which gives all its memory back when it ends. Where there
are two cores or more, two parts run at a time, each on cores of its own: most of the time goes
into starting engines, on one core, and engines that share cores wait for each other. Tests of
engines take longest, so they are several parts; a part's engines are not another's. With ``--step``
targets of the Makefile are parts, too: the type checker and the documentation use one core each.
A sixth of the time these cores would wait, for servers to come up and for each other; a third part
fills it, one that has no engines, in which nothing depends on how long it takes.

Lines are shown as they come, with the part's name in front. What failed is shown again at the end,
and the last line is pytest's, with the numbers of all parts together. The tests also fail if their
processes together ever take more than :data:`MOST_MEMORY_GIB`.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent

ENGINE_FILES = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/engine/test_*.py"))
E2E_FILES = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/e2e/test_*.py"))
RAY_FILES = [name for name in E2E_FILES if "test_ray_" in name]  # a cluster for each
NEXT_VLLM = "0.33.0"
NEXT = "next vllm"
# Run again with the sources of a newer vLLM over the binaries of this one: one test of a kind,
# and all of what another vLLM may decide in another way.
NEXT_TESTS = [
    f"tests/engine_v2/test_{name}"
    for name in (
        "harness.py::test_the_vllm_that_was_asked_for_runs",
        "harness.py::test_v2_runs_and_answers_like_v1",
        "identity_v2.py::test_same_tokens[mixed_lengths-oracle]",
        "identity_v2.py::test_same_tokens[seeded-oracle_tree]",
        "trees_v2.py::test_trees_really_move_blocks",
        "verifying_v2.py::test_eta_cuts_what_is_improbable",
        "async.py::test_sampling_grammars_and_penalties[oracle_tree]",
        "late_tables.py::test_sampling_grammars_and_penalties_together",
        "runner_choice.py",
        "full_graphs.py",
        "width_scheduler.py",
    )
]
NEXT_ON_V1 = "next vllm v1"
NEXT_ON_V1_TESTS = ["tests/engine/test_kv_blocks.py", "tests/engine/test_greedy_identity.py"]
UNIT_ENTRIES = sorted(
    str(p.relative_to(ROOT))
    for p in (ROOT / "tests" / "unit").iterdir()
    if p.name.startswith("test_") or (p.is_dir() and any(p.rglob("test_*.py")))
)
UNIT_PARTS = {f"unit {i + 1}": UNIT_ENTRIES[i::3] for i in range(3)}
PARTS = {  # those that take longest first, so that both lanes end at about the same time
    "e2e": [name for name in E2E_FILES if name not in RAY_FILES],
    "engine 1": ENGINE_FILES[0::4],
    "engine v2": ["tests/engine_v2"],  # Triton made visible there changes the V1 runner, too
    "ray": RAY_FILES,  # when e2e has ended, as both take much memory
    "engine 2": ENGINE_FILES[1::4],
    "engine 3": ENGINE_FILES[2::4],
    "engine 4": ENGINE_FILES[3::4],
    NEXT: NEXT_TESTS,
    NEXT_ON_V1: NEXT_ON_V1_TESTS,
    **UNIT_PARTS,
}
PATIENT = {*UNIT_PARTS}  # parts that may run in the gaps of others, beside the steps
GAPS_NICE = 10
# What runs in gaps has one thread for its products: two of them, on cores that others use, spin
# while they wait for each other, and a test of two seconds takes minutes.
IN_GAPS = {"OMP_NUM_THREADS": "1"}
# Of the environment of all parts: where Python may not keep what it compiled, each of some hundred
# programs compiles this package again.
COMMON = {"PYTHONDONTWRITEBYTECODE": ""}
# Of the environment of a part.
VARIABLES = {name: {"SPEC_EXT_NEXT_VLLM": NEXT_VLLM} for name in (NEXT, NEXT_ON_V1)}
BOOT = str(ROOT / "tests" / "boot")  # imported first by each program that a part starts, too
GIB = 1 << 30
MOST_MEMORY_GIB = 16.0
SAMPLE_S = 2.0  # each sample takes a twentieth of a second
SHOWN_AGAIN = 150  # lines of the tracebacks of a part
PASSED, FAILED, STOPPED, NO_TESTS = 0, 1, 2, 5  # pytest's exit statuses after a closing line

# "===== 3 failed, 1 passed in 1.23s =====", with -q without the frame
CLOSING = re.compile(r"=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s(?: \([\d:]+\))? ?=*")
COUNTABLE = ("error", "warning")  # its words that have a plural
SECTION = re.compile(r"=+ (.+) =+")


@dataclass
class Part:
    """A pytest process, or one of make, and what it said."""

    name: str
    arguments: Sequence[str]
    is_step: bool = False
    """A target of the Makefile: its name is the target, and there are no arguments."""
    is_patient: bool = False
    """It may run in the gaps that others leave."""
    lines: list[str] = field(default_factory=list)
    status: int | None = None
    seconds: float = 0.0

    @property
    def command(self) -> list[str]:
        """What to run in the repository."""
        if self.is_step:
            return ["make", "--no-print-directory", self.name]
        return [sys.executable, "-m", "pytest", *self.arguments]

    @property
    def closing(self) -> str | None:
        """Pytest's last line; None if it did not come so far."""
        found = self.lines and not self.is_step and CLOSING.fullmatch(self.lines[-1])
        return found[1] if found else None

    @property
    def counts(self) -> Counter[str]:
        """Numbers of tests by what became of them."""
        pairs = (pair.split() for pair in (self.closing or "").split(", ") if pair)
        return Counter({_singular(word): int(number) for number, word in pairs})

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return self.status == PASSED or (self.status == NO_TESTS and not self.is_step)

    @property
    def problem(self) -> str | None:
        """What is wrong with the process itself; None if it came to its closing line."""
        if self.is_step:
            return None if self.passed else f"make ended with status {self.status}"
        if self.status == NO_TESTS:
            return None
        if self.closing and self.status in (PASSED, FAILED, STOPPED):
            return None
        killed = " (killed, perhaps for want of memory)" if self.status == -9 else ""
        return f"pytest ended with status {self.status}{killed}"

    def section(self, *names: str) -> list[str]:
        """Lines of the sections of these names, heads included."""
        wanted, found = False, []
        for line in self.lines:
            head = SECTION.fullmatch(line)
            if head:
                wanted = head[1] in names
            if wanted:
                found.append(line)
        return found

    def failures(self) -> list[str]:
        """The lines that name what failed."""
        summary = self.section("short test summary info")
        return [line for line in summary if line.startswith(("FAILED", "ERROR"))]


class Memory:
    """Watches what this process and all below it hold."""

    def __init__(self, runner: "Runner") -> None:
        self.peak = Counter[str]()
        """Bytes by part, when all together held most."""
        self._runner = runner
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.sample()

    def sample(self) -> None:
        """Look at all processes; who shares which pages is asked only where it may be a peak."""
        resident = self._by_part(lambda process: process.memory_info().rss)
        if resident.total() > self.peak.total():
            shared_once = self._by_part(lambda process: process.memory_full_info().pss)
            self.peak = max(self.peak, shared_once, key=Counter.total)

    def _by_part(self, size_of: Callable[[psutil.Process], int]) -> Counter[str]:
        """Bytes of the processes of each part, and of this one."""
        found = Counter[str]()
        for number, name in [(os.getpid(), ""), *self._runner.running().items()]:
            with contextlib.suppress(psutil.Error):  # it has just ended
                process = psutil.Process(number)
                for each in [process, *(process.children(recursive=True) if name else [])]:
                    with contextlib.suppress(psutil.Error):
                        found[name] += size_of(each)
        return found


def lanes(cores: Sequence[int], has_gpu: bool) -> list[list[int]]:
    """Cores for each of the parts that run at a time; one part where they would share a GPU."""
    if len(cores) < 2 or has_gpu:
        return [list(cores)]
    half = len(cores) // 2
    return [list(cores[:half]), list(cores[half:])]


class Runner:
    """Runs the parts, in their order, in as many lanes as there are, and patient ones in gaps."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.waiting = list(parts)
        self._choosing = threading.Lock()
        self._printing = threading.Lock()
        self._stopped = False
        self._running: dict[int, tuple[Part, subprocess.Popen[str]]] = {}  # by process id

    def run(self, cores_of_lanes: Sequence[Sequence[int]]) -> None:
        """Return when all parts have ended; ends them on Ctrl-C."""
        kinds = [(cores, False) for cores in cores_of_lanes]
        if len(cores_of_lanes) > 1:
            kinds.append(([core for cores in cores_of_lanes for core in cores], True))
        threads = [threading.Thread(target=self._lane, args=kind, daemon=True) for kind in kinds]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._stopped = True
            for _, process in [*self._running.values()]:
                process.terminate()
            raise

    def running(self) -> dict[int, str]:
        """Names of the parts that run now, by process."""
        return {number: part.name for number, (part, _) in [*self._running.items()]}

    def _lane(self, cores: Sequence[int], in_gaps: bool) -> None:
        os.sched_setaffinity(0, cores)  # of this thread, and of the processes that it starts
        while not self._stopped and (part := self._next(in_gaps)):
            self._run_part(part, in_gaps)

    def _next(self, in_gaps: bool) -> Part | None:
        with self._choosing:
            fitting = [part for part in self.waiting if part.is_patient or not in_gaps]
            if not fitting:
                return None
            self.waiting.remove(fitting[0])
            return fitting[0]

    def _run_part(self, part: Part, in_gaps: bool) -> None:
        started = time.monotonic()
        paths = os.pathsep.join(filter(None, [BOOT, os.environ.get("PYTHONPATH")]))
        variables = {**COMMON, **(IN_GAPS if in_gaps else {}), **VARIABLES.get(part.name, {})}
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._running[process.pid] = part, process
        if in_gaps:
            # And all that it starts.
            psutil.Process(process.pid).nice(max(GAPS_NICE, os.nice(0)))
        for line in process.stdout or ():
            part.lines.append(line.rstrip("\n"))
            with self._printing:
                print(f"{part.name:>9} | {part.lines[-1]}", flush=True)
        part.status = process.wait()
        del self._running[process.pid]
        part.seconds = time.monotonic() - started


def report(parts: Sequence[Part], peak: Counter[str], seconds: float) -> tuple[list[str], bool]:
    """What stands at the end.

    Args:
        parts: All of them, ended.
        peak: Bytes by part, when all processes together held most.
        seconds: Of the whole.

    Returns:
        Lines: failures, one for each part, and pytest's for all; and whether nothing failed.
    """
    lines: list[str] = []
    for part in parts:
        traces = part.section("FAILURES", "ERRORS")
        if part.problem:
            traces = part.lines
        if len(traces) > SHOWN_AGAIN:
            lines.append(f"{part.name}: {len(traces) - SHOWN_AGAIN} lines more are further up")
        lines += traces[-SHOWN_AGAIN:]
    held = ", ".join(f"{name} {size / GIB:.1f}" for name, size in peak.most_common() if name)
    most = f"{peak.total() / GIB:.1f} GiB"
    errors = [f"ERROR {part.name}: {part.problem}" for part in parts if part.problem]
    if peak.total() > MOST_MEMORY_GIB * GIB:
        errors.append(
            f"ERROR memory: the tests took {most} at once, expected at most "
            f"{MOST_MEMORY_GIB:g} GiB: which engines live longer than they are needed?"
        )
    lines += [line for part in parts for line in part.failures()]
    lines += errors
    counts = sum((part.counts for part in parts), Counter[str]())
    counts["error"] += len(errors)
    for part in parts:
        outcome = part.problem or part.closing or ("passed" if part.is_step else "no tests ran")
        lines.append(f"{part.name}: {outcome} ({part.seconds:.0f} s)")
    lines.append(f"memory: at most {most} at once ({held})")
    lines.append(f" {_in_words(counts) or 'no tests ran'} in {seconds:.2f}s ".center(80, "="))
    return lines, not errors and all(part.passed for part in parts)


def _in_words(counts: Counter[str]) -> str:
    """As pytest's closing line has it, in its order."""
    known = ["failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning"]
    order = [*known, *sorted(set(counts) - {*known, "error"}), "error"]
    plural = {word: "s" if word in COUNTABLE and counts[word] > 1 else "" for word in order}
    return ", ".join(f"{counts[word]} {word}{plural[word]}" for word in order if counts[word])


def _singular(word: str) -> str:
    return word.removesuffix("s") if word.removesuffix("s") in COUNTABLE else word


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Run all tests; other arguments go to every pytest.", allow_abbrev=False
    )
    parser.add_argument(
        "--step",
        metavar="TARGET",
        action="append",
        default=[],
        help="a target of the Makefile that is run beside the tests; if it fails, they do",
    )
    given, for_pytest = parser.parse_known_args()
    started = time.monotonic()
    parts = [
        Part(name, [*folders, *for_pytest], is_patient=name in PATIENT)
        for name, folders in PARTS.items()
    ]
    parts += [Part(step, [], is_step=True, is_patient=True) for step in given.step]
    cores = sorted(os.sched_getaffinity(0))
    runner = Runner(parts)
    with Memory(runner) as memory:
        try:
            runner.run(lanes(cores, has_gpu=shutil.which("nvidia-smi") is not None))
        except KeyboardInterrupt:
            return 130
    seconds = time.monotonic() - started
    lines, passed = report(parts, memory.peak, seconds)
    print("\n".join(lines), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
