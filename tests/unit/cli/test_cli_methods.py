# SPDX-License-Identifier: Apache-2.0
"""``list`` and ``explain``, on a method made for the purpose."""

import ast
import json
import shlex
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field

from vllm_spec_ext.cli import explain as explain_module
from vllm_spec_ext.cli.explain import example_config, explain
from vllm_spec_ext.cli.list_methods import list_methods
from vllm_spec_ext.cli.option_docs import option_docs
from vllm_spec_ext.errors import UnknownNameError
from vllm_spec_ext.options import MethodOptions, Options, RequestOptions
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import BaseProposer, proposer


class TrialOptions(MethodOptions):
    """Options of the trial method."""

    checkpoint: str
    """Folder of ``heads``."""

    mode: Literal["fast", "good"] = "fast"
    """Which way."""

    width: int = Field(default=3, ge=1, le=9)
    """Candidates
    per node."""

    share: float | None = Field(default=None, gt=0, lt=1)
    """Part of [the] budget."""

    spans: list[tuple[int, int]] = Field(default=[])
    """Pairs."""


@proposer(
    "trial",
    summary="For tests.",
    options=TrialOptions,
    lossless=False,
    needs_checkpoint=True,
    tree=True,
    best_for="testing [bold]",
)
class Trial(BaseProposer):
    """Never run."""


@pytest.fixture(autouse=True)
def register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "trial", f"{__name__}:Trial")


def test_option_docs() -> None:
    docs = {doc.name: doc for doc in option_docs(TrialOptions)}
    assert list(docs) == ["adaptive_length", "checkpoint", "mode", "width", "share", "spans"]
    assert (docs["checkpoint"].type, docs["checkpoint"].default) == ("string", "required")
    assert docs["checkpoint"].text == "Folder of `heads`."
    assert (docs["mode"].type, docs["mode"].default) == ('"fast" | "good"', '"fast"')
    assert (docs["width"].type, docs["width"].default) == ("integer 1..9", "3")
    assert docs["width"].text == "Candidates per node."
    assert docs["share"].type == "number > 0, < 1 or null"
    assert docs["spans"].type == "list of [integer, integer]"


def test_option_docs_of_nested_classes() -> None:
    class Outer(Options):
        exact: Literal[True] = True
        few: list[Annotated[str, Field(min_length=2)]] = Field(default=[])

    docs = {doc.name: doc.type for doc in option_docs(Outer)}
    assert docs == {"exact": "true", "few": "list of string, at least 2 characters"}


def test_every_registered_option_is_documented() -> None:
    for name in registry.names():
        if name == "trial":
            continue
        found = registry.info(name)
        for doc in (*option_docs(found.options), *option_docs(found.request_options)):
            assert doc.text, f"{name}: {doc.name} has no documentation"


def test_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setitem(registry.BUILTIN, "gone", "vllm_spec_ext.proposers.gone:Gone")
    list_methods()
    shown = capsys.readouterr()
    rows = [line.strip("| ").split(" | ") for line in shown.out.splitlines()]
    (row,) = [cells for cells in rows if cells[0] == "trial"]
    assert row[1:] == ["no", "needed", "tree", "-", "testing [bold]"]
    assert "input_copy" in shown.out
    assert "not available: gone: No module named" in shown.err


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    explain("trial")
    shown = capsys.readouterr().out
    for words in (
        "trial: For tests.",
        "not lossless",
        "needs a trained checkpoint",
        "best for: testing [bold]",
        "num_speculative_tokens: required",
        "width: integer 1..9; default 3",
        "Part of [the] budget.",
        "checkpoint: string; required",
        "max_draft_tokens",
    ):
        assert words in shown


def test_explain_says_what_is_off_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    explain("cache_view")
    shown = capsys.readouterr().out
    assert "on CPUs: there verifying several tokens costs more than reading KV" in shown
    explain("cache_view", as_json=True)
    assert "draft_on_cpu" in json.loads(capsys.readouterr().out)["off_on_cpus"]
    explain("trial")
    assert "on CPUs:" not in capsys.readouterr().out


@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_commands_can_be_pasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    explain("input_copy")
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("vllm serve")]
    words = shlex.split(line)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == example_config(registry.info("input_copy"))
    snippet = shown.partition("Offline:\n")[2]
    tree = ast.parse("\n".join(line[2:] for line in snippet.splitlines()))
    assert repr(config) in {
        repr(ast.literal_eval(node)) for node in ast.walk(tree) if isinstance(node, ast.Dict)
    }
    body = shown.partition("-d '")[2].partition("'\n")[0]
    extra = json.loads(body)["vllm_xargs"]
    schema = registry.info("input_copy").request_options
    schema.model_validate({key.removeprefix("spec_ext."): value for key, value in extra.items()})


def test_example_config_names_what_is_required() -> None:
    assert example_config(registry.info("trial")) == {
        "method": "trial",
        "num_speculative_tokens": explain_module.EXAMPLE_TOKENS,
        "checkpoint": "...",
    }


def test_explain_json(capsys: pytest.CaptureFixture[str]) -> None:
    explain("trial", as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["options"]["properties"]["width"]["maximum"] == 9
    assert shown["request_options"]["properties"].keys() == RequestOptions.model_fields.keys()
    assert shown["lossless"] is False


def test_unknown_method() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'trial'"):
        explain("trail")


def test_typer_is_not_confused_by_the_functions() -> None:
    for function in (explain, list_methods):
        application = typer.Typer()
        application.command()(function)
        assert typer.main.get_command(application) is not None
