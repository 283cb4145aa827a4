# SPDX-License-Identifier: Apache-2.0
"""Results are written whole or not at all, and where the path leads."""

import contextlib
import errno
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from test_bench_cluster import PLANNED
from test_bench_report import _result
from test_bench_served import result as served_result

from vllm_spec_ext.bench import provenance
from vllm_spec_ext.bench.planner import RecordedStep, Recording, StepTimes
from vllm_spec_ext.bench.saved import to_json
from vllm_spec_ext.bench.served import Load, Pass
from vllm_spec_ext.cli import bench, plan, plan_drafts
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.cli.written_files import check_writable, write_result
from vllm_spec_ext.errors import SpecExtError

FORMER = "the former result"


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond 64 bytes: the rest of a write fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def make_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the commands below read, and stand-ins for their engines."""
    facts = provenance.collect(["vllm-spec", "bench"])
    Path("run.json").write_text(json.dumps(to_json(_result(), facts)))
    Path("planned.json").write_text(json.dumps(PLANNED))
    again = [1, 2, 3, 4, 5] * 3
    Path("r.jsonl").write_text(json.dumps({"prompt_token_ids": again, "output_token_ids": again}))
    monkeypatch.setattr(bench, "run", lambda *_: _result())
    one = Pass("a", Load(1, 0.0), 0, served_result(10.0, "text"))
    monkeypatch.setattr(bench.served, "run_passes", lambda *_: iter([one]))
    times = StepTimes({1: {0: 0.1, 8: 0.12}, 8: {0: 0.1, 8: 1.0}})
    full = Recording((tuple(RecordedStep(i, 8, 6 * (i % 2)) for i in range(4)),), 5e-5)
    recorded = lambda method, *_: plan.Recorded(method, {1: full, 8: full}, 99.6)  # noqa: E731
    monkeypatch.setattr(plan, "record_method", recorded)
    monkeypatch.setattr(plan, "measure_times", lambda *_: {"chain": times})
    drafted: Any = plan_drafts.DraftPlan([], times, 1, 1, ())
    monkeypatch.setattr(plan, "measure_drafts", lambda *_, **__: drafted)


WRITERS = [
    "bench --model m --json out.json",
    "bench --model m --markdown out.json",
    "bench --model m --serve a=http://a:1 --json out.json",
    "bench --model m --serve a=http://a:1 --markdown out.json",
    "report run.json --out out.json",
    "report run.json --markdown out.json",
    "report run.json --summary out.json",
    "simulate r.jsonl --method input_copy --json out.json",
    "simulate r.jsonl --method input_copy --plot out.svg",
    "plan --model m --json out.json",
    "plan --model m --plot out.svg",
    "plan --model m --drafts a --json out.json",
    "plan cluster planned.json --requests 20 --json out.json",
    "plan cluster planned.json --requests 20 --plot out.svg",
    "plan paper --gpu h100 --json out.json",
]


@pytest.mark.parametrize("line", WRITERS)
def test_a_full_disk_leaves_the_former_result(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    make_inputs(monkeypatch)
    out = Path(line.rsplit(maxsplit=1)[-1])
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 0
    assert len(out.read_text()) > 64
    out.write_text(FORMER)
    with full_disk(), pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    assert f"cannot write {str(out)!r}" in capsys.readouterr().err
    assert out.read_text() == FORMER
    assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob(".*.partial"))


def test_links_and_modes_stay(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    file, link = tmp_path / "data" / "out.json", tmp_path / "out.json"
    link.symlink_to(file)
    write_result(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    file.chmod(0o640)
    write_result(link, "newer")
    assert file.read_text() == "newer"
    assert file.stat().st_mode & 0o777 == 0o640


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    """/dev/stdout, say, or a pipe: nothing may take its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_result(pipe, "text")
        assert os.read(reader, 100) == b"text"
        assert pipe.is_fifo()
        with pipe.open("wb") as writer:
            write_result(Path(f"/dev/fd/{writer.fileno()}"), "more")
        assert os.read(reader, 100) == b"more"
    finally:
        os.close(reader)
    file = tmp_path / "file"
    with file.open("wb") as writer:  # as /dev/stdout, where the output goes to a file
        write_result(Path(f"/dev/fd/{writer.fileno()}"), "text")
        assert os.fstat(writer.fileno()).st_ino == file.stat().st_ino


def read_all(path: Path) -> "Future[bytes]":
    """What somebody writes into a pipe, until he closes it."""
    future: Future[bytes] = Future()
    # A command that fails never opens it: nobody waits for this thread then.
    Thread(target=lambda: future.set_result(path.read_bytes()), daemon=True).start()
    return future


@pytest.mark.parametrize("line", WRITERS)
def test_every_command_writes_into_a_pipe(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    make_inputs(monkeypatch)
    pipe = Path(line.rsplit(maxsplit=1)[-1])
    os.mkfifo(pipe)
    found = read_all(tmp_path / pipe)
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 0
    assert len(found.result(60)) > 64
    assert pipe.is_fifo()
    assert not list(tmp_path.glob(".*.partial"))


def test_a_pipe_takes_more_than_it_holds(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found, data = read_all(pipe), os.urandom(1 << 20)
    write_result(pipe, data)
    assert found.result(60) == data


def test_a_terminal_is_written_to() -> None:
    ours, theirs = os.openpty()
    try:
        name = Path(os.ttyname(theirs))
        check_writable(name)
        write_result(name, "text")
        assert os.read(ours, 100) == b"text"
        assert name.is_char_device()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_file_that_the_output_goes_to_keeps_what_it_has(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    with file.open("ab") as output:  # >> file
        output.write(b"before\n")
        output.flush()
        name = Path(f"/dev/fd/{output.fileno()}")
        link.symlink_to(name)
        own = (Path(f"/proc/{process}/fd/{output.fileno()}") for process in ("self", os.getpid()))
        for path in (name, link, *own):
            check_writable(path)
            write_result(path, "text\n")
        output.write(b"behind\n")
    assert file.read_text() == "before\n" + 4 * "text\n" + "behind\n"


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_standard_output_that_goes_to_a_file(mode: str, tmp_path: Path) -> None:
    """What was printed stays before the result, and what is printed comes behind it."""
    lines = (
        "from pathlib import Path",
        "from vllm_spec_ext.cli.written_files import check_writable, write_result",
        "print('first')",
        "check_writable(Path('/dev/stdout'))",
        "write_result(Path('/dev/stdout'), 'result\\n')",
        "print('last')",
    )
    file = tmp_path / "file"
    file.write_text("before\n")
    with file.open(mode) as output:
        subprocess.run([sys.executable, "-c", "\n".join(lines)], stdout=output, check=True)
    before = "before\n" if mode == "ab" else ""
    assert file.read_text() == f"{before}first\nresult\nlast\n"


def test_a_socket_as_output_is_written_to() -> None:
    """Of a service manager, say; no name of it can be opened."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        name = Path(f"/dev/fd/{theirs.fileno()}")
        check_writable(name)
        write_result(name, "text")
        assert ours.recv(100) == b"text"


def test_what_is_not_open_for_writing_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with file.open("rb") as reader:
        name = Path(f"/dev/fd/{reader.fileno()}")
        with pytest.raises(SpecExtError, match="it is not open for writing; give another"):
            check_writable(name)
    with pytest.raises(SpecExtError, match="it is not open for writing; give another"):
        check_writable(name)  # closed


def test_a_full_disk_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    file.write_text(FORMER)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpecExtError, match=r"cannot write .*: No space left on device; free"):
        write_result(file, "new")
    assert file.read_text() == FORMER


def test_a_file_that_may_be_written_but_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is mounted by itself into a container, say."""

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "replace", busy)
    file = tmp_path / "out.json"
    file.write_text(FORMER)
    write_result(file, "new")
    assert file.read_text() == "new"
    assert os.listdir(tmp_path) == ["out.json"]
