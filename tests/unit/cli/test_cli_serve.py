# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec serve``: everything up to the moment it becomes ``vllm serve``."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_spec_ext.cli import serve as serve_module
from vllm_spec_ext.cli.demo_drafters import demo_heads
from vllm_spec_ext.cli.plugin_visibility import invisible_because
from vllm_spec_ext.cli.serve import (
    parse_settings,
    serve,
    serve_arguments,
    speculative_config,
)
from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.parsed_method import MAX_DRAFT_TOKENS, parse_method


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


def test_config_has_only_given_options() -> None:
    """How much is drafted by default depends on where the engine runs."""
    config = speculative_config("input_copy", {"max_ngram": 4}, None)
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


def test_the_bound_is_vllms() -> None:
    sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")
    assert sampler.MAX_SPEC_LEN == MAX_DRAFT_TOKENS


def test_what_the_engine_takes_beside_the_methods_own_options() -> None:
    given = {
        "online": {"folder": "learned"},
        "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 64, 0]],
    }
    assert speculative_config("blockwise", {"model": "heads", **given}, 4) == {
        "method": "blockwise",
        "num_speculative_tokens": 4,
        "model": "heads",
        **given,
    }
    with pytest.raises(SpecExtError, match="online: input_copy cannot learn"):
        speculative_config("input_copy", {"online": {"folder": "learned"}}, 4)
    with pytest.raises(SpecExtError, match="folderr"):
        speculative_config("blockwise", {"model": "heads", "online": {"folderr": "x"}}, 4)


def test_bad_options() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'max_ngram'"):
        speculative_config("input_copy", {"max_ngrm": 4}, None)
    with pytest.raises(SpecExtError, match=r"max_ngram.*found 'many'"):
        speculative_config("input_copy", {"max_ngram": "many"}, None)
    with pytest.raises(UnknownNameError, match="Did you mean 'input_copy'"):
        speculative_config("input_cpy", {}, None)
    with pytest.raises(SpecExtError, match="max_ngram is given twice, with hyphens and"):
        parse_method({"max_ngram": 4, "max-ngram": 5}, "input_copy")
    with pytest.raises(SpecExtError, match="use --method NAME"):
        speculative_config("input_copy", {"method": "auto"}, None)
    with pytest.raises(SpecExtError, match="use --num-speculative-tokens"):
        speculative_config("input_copy", {"num_speculative_tokens": 3}, None)


@pytest.mark.parametrize(
    "argument",
    [
        "--speculative-config",
        "-sc",
        "--speculative-config={}",
        "--spec-method",
        "--speculative-config.method=ngram",
        "-sc.method",
    ],
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
    monkeypatch.setattr(serve_module.vllm_metadata, "environment", lambda: {"MADE": "here"})
    serve("m", "input_copy")
    ((program, command, variables),) = started
    assert program == sys.executable
    assert command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "m"]
    assert variables == {"MADE": "here"}


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


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Configuration and tokenizer of a target, and no weights."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    folder = tmp_path / "target"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="?"
    ).save_pretrained(folder)
    (folder / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 3, "hidden_size": 64, "num_attention_heads": 4}'
    )
    return folder


def test_dry_run_looks_at_heads(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def dry_run(model: str, *settings: str, arguments: Sequence[str] = ()) -> str:
        serve(model, "blockwise", list(settings), 2, dry_run=True, vllm_arguments=list(arguments))
        shown = capsys.readouterr()
        assert shown.out.startswith("vllm serve ")
        return shown.err

    with pytest.raises(SpecExtError, match="nothing"):
        dry_run(str(target), f"model={tmp_path / 'nothing'}")
    with pytest.raises(SpecExtError, match="64"):  # hidden size of the target, not of these heads
        dry_run(str(target), f"model={demo_heads()}")
    assert capsys.readouterr().out == ""
    assert "not checked: the files of blockwise" in dry_run("no/such-model", "model=heads")
    said = dry_run(str(target), "model=heads", arguments=["--tokenizer", "no/such-model"])
    assert "the tokenizer no/such-model cannot be loaded from this machine" in said


def test_dry_run_looks_for_draft_models(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether they fit the engine alone can tell."""
    for model, method, draft in (
        (str(target), "small_model", str(tmp_path / "gone")),
        (str(target), "nar", "./gone"),
        (str(tmp_path / "gone"), "auto", None),
    ):
        given = [] if draft is None else [f"model={draft}"]
        with pytest.raises(SpecExtError, match=r"no such folder: .*gone"):
            serve(model, method, given, dry_run=True)
    serve(str(target), "small_model", [f"model={target}"], dry_run=True)
    assert f"not checked: whether {target} can draft" in capsys.readouterr().err
    levels = [{"method": "adaptive_ngram", "corpus": "./gone"}, {"model": str(target)}]
    with pytest.raises(SpecExtError, match="gone"):
        serve(str(target), "cascade", [f"levels={json.dumps(levels)}"], dry_run=True)


def test_dry_run_looks_at_a_corpus(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_spec_ext.cli.main import main

    (tmp_path / "text.txt").write_text("a b a b a\n" * 5)
    corpus = tmp_path / "corpus"
    build = ["corpus", "build", "--tokenizer", str(target), "--input", str(tmp_path / "text.txt")]
    with pytest.raises(SystemExit):
        main([*build, "--out", str(corpus), "--quiet"])
    serve(str(target), "adaptive_ngram", [f"corpus={corpus}"], dry_run=True)
    assert "checked: options and files of adaptive_ngram" in capsys.readouterr().err
    with pytest.raises(SpecExtError, match="gone"):
        serve(str(target), "adaptive_ngram", [f"corpus={tmp_path / 'gone'}"], dry_run=True)


def test_dry_run_refuses_what_a_server_does(target: Path, tmp_path: Path) -> None:
    """Whose requests without a salt share nothing by default."""
    settings = ["overlay=shared", f"overlay_file={tmp_path / 'learned'}"]
    with pytest.raises(SpecExtError, match="share_unsalted"):
        serve(str(target), "adaptive_ngram", settings, dry_run=True)
    serve(str(target), "adaptive_ngram", [*settings, "share_unsalted=true"], dry_run=True)
