# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec online``: what it shows of a folder, and the orders that it leaves there."""

import os
import time
from pathlib import Path

import psutil
import pytest

from vllm_spec_ext.cli.main import main
from vllm_spec_ext.online.folder import (
    Control,
    EngineState,
    FolderFacts,
    TrainerState,
    Verdict,
    read_record,
    write_record,
)
from vllm_spec_ext.online.versions import version_folder, write_version
from vllm_spec_ext.options import OnlineOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    facts = FolderFacts(
        method="blockwise",
        target="a model",
        drafter="own",
        vocab_size=9,
        options=OnlineOptions(folder=str(tmp_path)),
    )
    write_record(tmp_path, facts)
    for number in (0, 2, 5):
        write_version(tmp_path, number, {"config.json": b"{}"}, "own")
    verdicts = tuple(
        Verdict(version=n, kept=kept, reason="because", before=1.0, after=1.5, when=time.time())
        for n, kept in ((2, True), (4, False), (5, True))
    )
    write_record(
        tmp_path, EngineState(serving=5, since=time.time(), verdicts=verdicts, acceptance=1.234)
    )
    return tmp_path


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["online", *words])
    return int(ended.value.code or 0)


def test_status(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("status", str(folder)) == 0
    shown = capsys.readouterr().out
    for part in ("version 5", "1.234", "0, 2, 5", "because", "refused", "none so far"):
        assert part in shown
    now = time.time()
    write_record(folder, TrainerState(pid=1, started=now, alive_at=now, steps=77, core_share=0.25))
    assert call("status", str(folder)) == 0
    assert "77 steps, 0.25 cores" in capsys.readouterr().out
    # There is a process of this number, but it is younger.
    long_ago = psutil.Process().create_time() - 3600.0
    write_record(folder, TrainerState(pid=os.getpid(), started=now, alive_at=long_ago))
    monkeypatch.setattr(time, "time", lambda: long_ago + 3600.0)
    assert call("status", str(folder)) == 0
    assert "not running for 60 minutes" in capsys.readouterr().out


def test_a_trainer_that_waits_for_a_core_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    write_record(folder, TrainerState(pid=os.getpid(), started=now, alive_at=now))
    monkeypatch.setattr(time, "time", lambda: now + 600.0)
    assert call("status", str(folder)) == 0
    assert f"process {os.getpid()} runs, not heard of for 10 minutes" in capsys.readouterr().out


def test_freeze_and_rollback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("freeze", str(folder)) == 0
    assert read_record(folder, Control) == Control(serial=1, frozen=True)
    assert call("rollback", str(folder)) == 0
    assert read_record(folder, Control) == Control(serial=2, frozen=True, serve=2)
    assert call("freeze", str(folder), "--off") == 0
    assert read_record(folder, Control) == Control(
        serial=3, frozen=False, serve=2
    )  # not obeyed yet
    assert call("rollback", str(folder), "--to", "0") == 0
    assert read_record(folder, Control) == Control(serial=4, serve=0)
    (version_folder(folder, 2) / "config.json").write_bytes(b"{ }")
    assert call("rollback", str(folder), "--to", "2") == 2
    assert call("rollback", str(folder), "--to", "7") == 2
    assert read_record(folder, Control) == Control(serial=4, serve=0)
    assert "damaged" in capsys.readouterr().err
    write_record(folder, EngineState(obeyed=4))
    assert call("freeze", str(folder)) == 0
    assert read_record(folder, Control) == Control(serial=5, frozen=True)
    (folder / "control.json").unlink()  # as its own error advises where it is damaged
    assert call("rollback", str(folder), "--to", "0") == 0
    assert read_record(folder, Control) == Control(serial=5, serve=0)
    write_record(folder, EngineState(obeyed=5, serving=9, served=(2, 7, 9)))
    assert call("rollback", str(folder)) == 2
    assert "version 7, which was kept later, is no longer there" in capsys.readouterr().out


def test_other_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "freeze", "rollback", "train"):
        assert call(command, str(tmp_path / "none")) == 2
        assert "no online.json" in capsys.readouterr().err
