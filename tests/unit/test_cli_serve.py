# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec serve``: everything up to the moment it becomes ``vllm serve``."""

import json
import os
import shlex
import sys
from typing import Any

import pytest

from vllm_spec_ext.cli import serve as serve_module
from vllm_spec_ext.cli.plugin_visibility import invisible_because
from vllm_spec_ext.cli.serve import (
    MAX_DRAFT_TOKENS,
    parse_settings,
    serve,
    serve_arguments,
    speculative_config,
)
from vllm_spec_ext.errors import SpecExtError, UnknownNameError


def test_settings_are_json_or_text() -> None:
    given = ["max-ngram=4", "source=prompt", 'match="best"', "also_output=false", "x=[1, 2]", "y="]
    assert parse_settings(given) == {
        "max_ngram": 4,
        "source": "prompt",
        "match": "best",
        "also_output": False,
        "x": [1, 2],
        "y": "",
    }
    assert parse_settings(["text=a=b"]) == {"text": "a=b"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [(["max_ngram"], "KEY=VALUE"), (["=4"], "KEY=VALUE"), (["a=1", "a=2"], "given twice")],
)
def test_bad_settings(settings: list[str], words: str) -> None:
    with pytest.raises(SpecExtError, match=words):
        parse_settings(settings)


def test_config_has_the_default_length_and_only_given_options() -> None:
    config = speculative_config("input_copy", {"max_ngram": 4}, None)
    assert config.pop("num_speculative_tokens") >= 1
    assert config == {"method": "input_copy", "max_ngram": 4}
    assert speculative_config("input_copy", {}, 5)["num_speculative_tokens"] == 5


def test_acceptance_rule_belongs_to_every_method() -> None:
    given = {"scorer": {"type": "top_k", "k": 2}, "allow_lossy": True}
    config = speculative_config("input_copy", given, 4)
    assert config == {"method": "input_copy", "num_speculative_tokens": 4, **given}
    with pytest.raises(SpecExtError, match="allow_lossy"):
        speculative_config("input_copy", {"scorer": {"type": "top_k", "k": 2}}, 4)
    with pytest.raises(SpecExtError, match="allow_lossy: found 'yes'"):
        speculative_config("input_copy", {**given, "allow_lossy": "yes"}, 4)


@pytest.mark.parametrize("tokens", [0, -1, MAX_DRAFT_TOKENS + 1])
def test_length_out_of_range(tokens: int) -> None:
    with pytest.raises(SpecExtError, match=f"found {tokens}, expected 1 to 128"):
        speculative_config("input_copy", {}, tokens)


def test_bad_options() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'max_ngram'"):
        speculative_config("input_copy", {"max_ngrm": 4}, None)
    with pytest.raises(SpecExtError, match=r"max_ngram.*found 'many'"):
        speculative_config("input_copy", {"max_ngram": "many"}, None)
    with pytest.raises(UnknownNameError, match="Did you mean 'input_copy'"):
        speculative_config("input_cpy", {}, None)
    with pytest.raises(SpecExtError, match="use --num-speculative-tokens"):
        speculative_config("input_copy", {"num_speculative_tokens": 3}, None)


@pytest.mark.parametrize(
    "argument", ["--speculative-config", "-sc", "--speculative-config={}", "--spec-method"]
)
def test_two_speculative_configurations_are_refused(argument: str) -> None:
    with pytest.raises(SpecExtError, match="remove one of the two"):
        serve_arguments("m", {}, ["--port", "1", argument])


def test_dry_run_prints_a_command_for_the_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    serve(
        "a model", "input_copy", ["source=prompt"], 7, dry_run=True, vllm_arguments=["--port", "1"]
    )
    words = shlex.split(capsys.readouterr().out)
    assert words[:4] == ["vllm", "serve", "a model", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "input_copy",
        "num_speculative_tokens": 7,
        "source": "prompt",
    }
    assert words[5:] == ["--port", "1"]


def test_becomes_vllm_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    monkeypatch.setattr(serve_module, "invisible_because", lambda: None)
    monkeypatch.setattr(serve_module, "require", lambda: None)
    monkeypatch.setattr(
        serve_module.vllm_metadata, "environment", lambda fallback: {"FALLBACK": fallback.name}
    )
    serve("m", "input_copy")
    ((program, command, variables),) = started
    assert program == sys.executable
    assert command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "m"]
    assert variables == {"FALLBACK": "metadata"}


def test_nothing_starts_when_vllm_would_not_find_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(serve_module, "invisible_because", lambda: "no entry point; fix: install")
    with pytest.raises(SpecExtError, match="would not know 'input_copy': no entry point; fix"):
        serve("m", "input_copy")


def test_filtered_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm_spec_ext.cli.plugin_visibility.entry_points", lambda **_: ["spec_ext"]
    )
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert invisible_because() is None
    monkeypatch.setenv("VLLM_PLUGINS", "other,spec_ext")
    assert invisible_because() is None
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "export VLLM_PLUGINS=other,spec_ext" in (invisible_because() or "")
    monkeypatch.setattr("vllm_spec_ext.cli.plugin_visibility.entry_points", lambda **_: [])
    assert "fix: pip install" in (invisible_because() or "")


def test_sharing_between_requests_without_a_salt() -> None:
    config = speculative_config("input_copy", {"share_unsalted": True}, 4)
    assert config["share_unsalted"] is True
    with pytest.raises(SpecExtError, match="share_unsalted: found 1, expected true or false"):
        speculative_config("input_copy", {"share_unsalted": 1}, 4)
