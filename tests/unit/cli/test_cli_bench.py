# SPDX-License-Identifier: Apache-2.0
"""`vllm-spec bench`: what its flags make of the settings."""

from typing import Any

import pytest
import typer

from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.cli import bench
from vllm_spec_ext.cli.main import main


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[BenchSettings]:
    """Those that a measurement would have been of."""
    found: list[BenchSettings] = []

    def run(settings: BenchSettings, *_: Any) -> None:
        found.append(settings)
        raise typer.Exit(0)

    monkeypatch.setattr(bench, "run", run)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["--batch-size", "1,8", "--methods", "plain,auto"],
        ["--batch-size", "1", "--batch-size", "8", "--methods", "plain", "--methods", "auto"],
    ],
    ids=["commas", "again"],
)
def test_lists_with_commas_and_flags_given_again(
    words: list[str], settings: list[BenchSettings]
) -> None:
    """A flag that was given again took the place of the first one, without a word."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--model", "m", *words])
    assert ended.value.code == 0
    assert settings[0].batch_size == [1, 8]
    assert settings[0].methods == ["plain", "auto"]
