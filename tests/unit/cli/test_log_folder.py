# SPDX-License-Identifier: Apache-2.0
"""What is left of a command's logs."""

from contextlib import suppress
from pathlib import Path

import pytest

from vllm_spec_ext.bench.engine_client import EngineFailed
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
