# SPDX-License-Identifier: Apache-2.0
"""How ``make test`` runs the parts: what its last lines say, and when it fails."""

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "run_tests.py"

PASSING = "def test_one(): pass\ndef test_two(): pass\n"
FAILING = (
    "import pytest\ndef test_wrong(): assert 1 == 2\n@pytest.mark.skip\ndef test_not(): pass\n"
)
DYING = "import os, signal\ndef test_dies(): os.kill(os.getpid(), signal.SIGKILL)\n"
BROKEN = "import nothing_of_this_name\n"
COLLECTING = """
import subprocess, sys

PROGRAM = '''
import gc, weakref
class Ring:
    def __init__(self):
        self.me = self
def collected(by):
    seen = weakref.ref(Ring())
    exec("import gc; gc.collect()", {"__name__": by})
    return seen() is None
print(collected("vllm.v1.engine.core"), collected("vllm_spec_ext.training"), collected("test"))
'''

def test_programs():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "False True True\\n", done
"""

ENDING = """
import subprocess, sys

PROGRAM = '''
import atexit, sys
class Ring:
    def __init__(self):
        self.me = self
    def __del__(self):
        print("taken apart")
ring = Ring()
atexit.register(print, "what the program does at its end")
sys.exit(3)
'''

def test_programs():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "what the program does at its end\\n", done
    assert done.returncode == 3
"""


@pytest.fixture
def run_tests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "run_tests", module)  # for its dataclass
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SAMPLE_S", 0.02)
    monkeypatch.setattr(module.sys, "argv", ["run_tests.py", "-p", "no:cacheprovider"])
    return module


Outcome = tuple[int, list[str]]


@pytest.fixture
def outcome(
    run_tests: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Outcome]:
    """Runs parts that consist of one file each; gives the exit status and the printed lines."""

    def run(**files: str) -> Outcome:
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        parts = {name: [str(tmp_path / f"test_{name}.py")] for name in files}
        monkeypatch.setattr(run_tests, "PARTS", parts)
        cores = os.sched_getaffinity(0)
        status = run_tests.main()
        assert os.sched_getaffinity(0) == cores
        return status, capsys.readouterr().out.splitlines()

    return run


def test_all_pass(outcome: Callable[..., Outcome]) -> None:
    status, lines = outcome(one=PASSING, other=PASSING)
    assert status == 0
    assert lines[-1].startswith("=====")
    assert " 4 passed in " in lines[-1]
    assert re.fullmatch(r"memory: at most \d+\.\d GiB at once \(.+\)", lines[-2])
    assert lines[-3].startswith("other: 2 passed (")
    assert any(line.startswith("      one | ") and "test_one.py .." in line for line in lines)


def test_what_failed_in_the_first_part_stands_at_the_end(outcome: Callable[..., Outcome]) -> None:
    status, lines = outcome(first=FAILING, second=PASSING)
    assert status == 1
    assert " 1 failed, 2 passed, 1 skipped in " in lines[-1]
    own = [line for line in lines if " | " not in line]
    assert any("assert 1 == 2" in line for line in own)
    assert sum(line.startswith("FAILED ") and "test_wrong" in line for line in own) == 1
    assert any(line.startswith("first: 1 failed, 1 skipped (") for line in own)


@pytest.mark.parametrize(
    ("text", "words"), [(DYING, "status -9 (killed"), (BROKEN, "nothing_of_this_name")]
)
def test_a_part_that_does_not_come_to_its_end(
    text: str, words: str, outcome: Callable[..., Outcome]
) -> None:
    status, lines = outcome(ill=text, well=PASSING)
    assert status == 1
    assert " 2 passed, 1 error in " in lines[-1]
    assert any(words in line for line in lines if " | " not in line)


def test_vllm_collects_no_garbage_but_tests_do(outcome: Callable[..., Outcome]) -> None:
    """In the programs that tests start, too: vLLM's collections are a quarter of its start."""
    status, lines = outcome(one=COLLECTING)
    assert status == 0, lines


def test_programs_end_without_taking_all_apart(outcome: Callable[..., Outcome]) -> None:
    """A million objects of vLLM's imports: as long as the imports of a small program."""
    status, lines = outcome(one=ENDING)
    assert status == 0, lines


def test_too_much_memory_fails(
    run_tests: ModuleType, outcome: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "MOST_MEMORY_GIB", 0.001)
    status, lines = outcome(one=PASSING)
    assert status == 1
    assert any(line.startswith("ERROR memory: the tests took ") for line in lines)
    assert " 2 passed, 1 error in " in lines[-1]


HOLDING = """
import mmap, os, time
def test_holds():
    size = 200 << 20
    shared = mmap.mmap(-1, size)  # of this process and its child
    shared[::4096] = b"x" * (size // 4096)
    child = os.fork()
    if not child:
        assert shared[::4096].count(b"x") == size // 4096
        time.sleep(1)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_memory_of_each_part_is_told_and_shared_pages_count_once(
    outcome: Callable[..., Outcome],
) -> None:
    _, lines = outcome(one=HOLDING)
    found = re.search(r"at once \(one (\d\.\d)\)", lines[-2])
    assert found, lines[-2]
    assert 0.2 <= float(found[1]) <= 0.3  # each of the two processes has 0.2 GiB of it


def test_steps_of_make_run_beside_the_tests(
    run_tests: ModuleType,
    outcome: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = "\t@echo 'a word of {0}'; exit {1}\n"
    (tmp_path / "Makefile").write_text(
        "types:\n" + words.format("types", 0) + "docs:\n" + words.format("docs", 5)
    )
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    arguments = ["run_tests.py", "--step=types", "--step=docs", "-q"]
    monkeypatch.setattr(run_tests.sys, "argv", arguments)
    status, lines = outcome(one=PASSING)
    assert status == 1
    assert "    types | a word of types" in lines
    own = [line for line in lines if " | " not in line]
    assert "a word of docs" in own  # what failed is shown again
    assert "a word of types" not in own
    assert [line for line in own if line.startswith("ERROR ")] == [
        "ERROR docs: make ended with status 2"
    ]
    assert any(line.startswith("types: passed (") for line in own)
    assert " 2 passed, 1 error in " in lines[-1]


def test_continuous_integration_runs_every_check() -> None:
    """What `make check` has, the documentation, and all tests."""
    root = SCRIPT.parents[1]
    steps = set(re.findall(r"--step=(\w+)", (root / ".ci/run").read_text()))
    (check,) = re.findall(r"^check: (.+?)  ##", (root / "Makefile").read_text(), re.MULTILINE)
    assert steps == {*check.split(), "docs"}


def test_nothing_selected_is_no_failure(
    run_tests: ModuleType, outcome: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests.sys, "argv", ["run_tests.py", "-k", "two"])
    status, lines = outcome(one=PASSING, other=FAILING)
    assert status == 0
    assert " 1 passed, 3 deselected in " in lines[-1]


@pytest.mark.parametrize(
    ("cores", "has_gpu", "lanes"),
    [
        ([3], False, [[3]]),
        ([0, 1], False, [[0], [1]]),
        ([0, 1, 4, 5, 6], False, [[0, 1], [4, 5, 6]]),
        ([0, 1], True, [[0, 1]]),
    ],
)
def test_lanes(run_tests: ModuleType, cores: list[int], has_gpu: bool, lanes: object) -> None:
    assert run_tests.lanes(cores, has_gpu) == lanes


ALONE = """
import os, time
def test_order():
    here = {folder!r}
    seen = f"{{os.nice(0)}} {{os.environ.get('OMP_NUM_THREADS')}}"
    open(os.path.join(here, {name!r}), "w").write(seen)
    end = time.monotonic() + 20
    while not set({others!r}) <= set(os.listdir(here)) and time.monotonic() < end:
        time.sleep(0.01)
    assert set({others!r}) <= set(os.listdir(here))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no gaps")
def test_a_patient_part_runs_beside_two_others(
    run_tests: ModuleType,
    outcome: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "seen"
    folder.mkdir()
    monkeypatch.setattr(run_tests, "PATIENT", {"patient"})
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(run_tests.shutil, "which", lambda name: None)
    names = ["one", "other", "patient"]
    files = {
        name: ALONE.format(folder=str(folder), name=name, others=[n for n in names if n != name])
        for name in names
    }
    status, lines = outcome(**files)  # each waits for the two others
    assert status == 0, lines
    nice, threads = {}, {}
    for name in names:
        found, threads[name] = (folder / name).read_text().split()
        nice[name] = int(found)
    assert nice["one"] == nice["other"] == os.nice(0)
    assert nice["patient"] == max(os.nice(0), run_tests.GAPS_NICE)
    # Two threads that wait for each other on cores which others use take minutes for seconds.
    assert threads["patient"] == "1"
    assert threads["one"] == threads["other"] == "2"


def test_every_test_file_is_in_one_part(run_tests: ModuleType) -> None:
    root = SCRIPT.parents[1]
    found = Counter(
        file
        for part, places in run_tests.PARTS.items()
        if part not in run_tests.VARIABLES  # run once more under other conditions
        for place in places
        for file in (
            (root / place).rglob("test_*.py") if (root / place).is_dir() else [root / place]
        )
    )
    assert found == Counter((root / "tests").rglob("test_*.py"))


def test_what_runs_again_with_a_newer_vllm_is_there(run_tests: ModuleType) -> None:
    assert run_tests.PARTS[run_tests.NEXT] == run_tests.NEXT_TESTS
    for place in run_tests.NEXT_TESTS:
        file, _, name = place.partition("::")
        text = (SCRIPT.parents[1] / file).read_text()
        assert name.partition("[")[0] in text, place


def test_a_part_has_variables_of_its_own(
    run_tests: ModuleType, outcome: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "VARIABLES", {"one": {"OF_A_PART": "yes"}})
    check = "import os\ndef test_it(): assert os.environ.get('OF_A_PART') == {!r}\n"
    status, _ = outcome(one=check.format("yes"), other=check.format(None))
    assert status == 0
