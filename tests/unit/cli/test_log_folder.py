# SPDX-License-Identifier: Apache-2.0
"""What is left of a command's logs."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from vllm_spec_ext.bench.engine_client import EngineFailed
from vllm_spec_ext.bench.session import BenchResult
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.cli import bench
from vllm_spec_ext.cli.log_folder import LogFolder
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.errors import SpecExtError


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (None, False),
        (SpecExtError("a prompt is too long"), False),
        (KeyboardInterrupt(), False),
        (EngineFailed("an engine died; its log: ..."), True),
    ],
)
def test_logs_stay_where_a_message_names_them(error: BaseException | None, stays: bool) -> None:
    logs = LogFolder("test")
    with suppress(BaseException), logs:
        (logs.path / "engine.log").write_text("said")
        if error is not None:
            raise error
    assert logs.path.exists() is stays
    with LogFolder("test") as kept:
        kept.keep()
    assert kept.path.exists()


def test_a_folder_that_was_named_stays(tmp_path: Path) -> None:
    with LogFolder("test", tmp_path / "logs" / "here"):
        pass
    assert (tmp_path / "logs" / "here").is_dir()


def test_the_demo_refuses_a_type_before_it_fetches_a_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--dtype", "fp16"])
    assert stop.value.code == 2
    assert "dtype" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecExtError, match=r"--log-dir .* expected a folder"):
        LogFolder("test", tmp_path / "file")


def test_the_log_of_a_dropped_method_outlives_what_ends_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its message named it."""
    paths: list[Path] = []

    def dropped(result: BenchResult, folder: Path, events: object) -> None:
        paths.append(folder)
        result.failures["auto"] = "ended"
        raise SpecExtError("a prompt is too long")

    monkeypatch.setattr(bench, "run_benchmark", dropped)
    with pytest.raises(SpecExtError, match="too long"):
        bench.run(BenchSettings(model="m"), Console(quiet=True), None)
    assert paths[0].is_dir()
    shutil.rmtree(paths[0])
