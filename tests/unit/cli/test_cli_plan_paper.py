# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec plan paper``: predictions without a GPU, an engine or a model."""

import json
from pathlib import Path

import pytest

from vllm_spec_ext.cli.main import main


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_a_table_json_and_where_it_pays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "paper.json"
    words = ["--gpu", "h100", "--model", "llama2-7b", "--context", "16k,32k,128k"]
    words += ["--draft", "mine: view,budget=4096,accept=0.92", "lookup,accept=0.1"]
    assert run("paper", *words, "--batch-size", "1", "--json", str(data)) == 0
    printed = capsys.readouterr().out
    assert "llama2-7b on h100, on paper: 13.5 GB of weights, 512 KiB of KV cache a token" in printed
    assert "| draft | batch | context | plain ms |" in printed
    assert "| mine | 1 | 32k |" in printed
    assert "| mine | 1 | 128k |  |  |  |  |  | needs 84 GB |  |" in printed
    assert "| draft | batch | pays from |" in printed
    assert "nothing was run on one" in printed
    assert "assumed" not in printed
    whole = json.loads(data.read_text(encoding="utf-8"))
    assert whole["measured"] is False
    rows = {(row["draft"], row["context"]): row for row in whole["predicted"]}
    short, long = rows["mine", 16384], rows["mine", 32768]
    assert 1.0 < short["speed_up"] < long["speed_up"]
    step_s = long["drafting_s"] + long["verify_s"]
    gain = long["tokens_per_step"] * long["plain_s"] / step_s
    assert long["speed_up"] == pytest.approx(gain)
    assert long["eager_drafts"]["speed_up"] < long["speed_up"]
    assert rows["mine", 131072]["fits"] is False
    (mine, lookup) = whole["break_even"]
    assert 4096 < mine["context"] < 16384 < mine["context_eager_drafts"]
    assert lookup["draft"] == "lookup,accept=0.1"


def test_flags_with_commas_may_be_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["paper", "--most-tokens", "2"]
    assert run(*few, "--context", "4k,8k", "--batch-size", "1,2") == 0
    printed = capsys.readouterr().out
    again = ["--context", "4k", "--context", "8k", "--batch-size", "1", "2"]
    assert run(*few, *again) == 0
    assert capsys.readouterr().out == printed


def test_the_published_result_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "paper.json"
    levels = (
        "TriForce: view,budget=4096,page=0,accept=0.9234,tokens=6; "
        "model=llama-68m,budget=256,accept=0.4649,tokens=2"
    )
    gpu = "a100,layer_us=160,forward_us=1000"
    words = ["--gpu", gpu, "--context", "122k", "--batch-size", "1", "--draft", levels]
    assert run("paper", *words, "--json", str(data)) == 0
    assert "| TriForce | 1 | 122k |" in capsys.readouterr().out
    (row,) = json.loads(data.read_text(encoding="utf-8"))["predicted"]
    assert row["speed_up"] == pytest.approx(2.31, rel=0.15)
    assert row["lengths"] == [6, 2]


def test_examples_say_that_their_acceptance_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("paper", "--context", "4k", "--most-tokens", "4", "--batch-size", "1") == 0
    printed = capsys.readouterr().out
    assert "Acceptance is assumed here" in printed
    for name in ("view", "view over lookup", "TriForce", "draft model"):
        assert f"| {name} | 1 | 4k |" in printed
    assert "the start" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["paper", "--context", "4x"], "context '4x': expected tokens"),
        (["paper", "--context", "0"], "context '0': expected tokens"),
        (["paper", "--batch-size", "0"], "batch size 0 is not positive"),
        (["paper", "--gpu", "abacus"], "unknown GPU: 'abacus'"),
        (["paper", "--model", "none/such"], "unknown model: 'none/such'"),
        (["paper", "--draft", "x: y"], "unknown level"),
        (["paper", "--json", "/none/such.json"], "cannot write"),
        (["--model", "m", "paper"], "an option (model) stands before 'paper'"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
