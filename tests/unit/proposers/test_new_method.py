# SPDX-License-Identifier: Apache-2.0
"""A new method is a folder, one line of registration and a page; all else follows from these."""

import json
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from vllm_spec_ext.cli import docs_tables
from vllm_spec_ext.cli.explain import explain
from vllm_spec_ext.cli.list_methods import list_methods
from vllm_spec_ext.cli.serve import speculative_config
from vllm_spec_ext.cli.simulate import Point, make_points, run_point
from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.parsed_method import parse_method
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.replay import Recording

ROOT = Path(__file__).resolve().parents[3]

METHOD = '''
"""Bets that the last token is said again."""

import numpy as np
from tmp_method.options import TmpOptions
from vllm_spec_ext.proposers.base import BaseProposer, chain, proposer


@proposer(
    "tmp_method",
    summary="Says the last token again.",
    options=TmpOptions,
    num_speculative_tokens=3,
    best_for="texts of one word",
    cost="next to nothing",
)
class TmpMethod(BaseProposer):
    def propose(self, step):
        copies = self.options.copies
        return [chain(np.repeat(r.token_ids[-1:], min(r.room, copies))) for r in step.requests]
'''

OPTIONS = '''
from pydantic import Field
from vllm_spec_ext.options import MethodOptions


class TmpOptions(MethodOptions):
    """Options of ``tmp_method``."""

    copies: int = Field(default=2, ge=1, le=5)
    """How often the last token is said again."""
'''

PAGE = "# `tmp_method`\n\n<!-- options: tmp_method -->\n<!-- end of options -->\n"


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a method that nobody has registered yet, and a copy of the docs with its page."""
    folder = tmp_path / "packages" / "tmp_method"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(METHOD)
    (folder / "options.py").write_text(OPTIONS)
    monkeypatch.syspath_prepend(folder.parent)
    copy = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", copy, ignore=shutil.ignore_patterns("figures"))
    for name in ("README.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    yield copy
    registry._third_party.cache_clear()
    for name in ("tmp_method.options", "tmp_method"):
        sys.modules.pop(name, None)


@pytest.fixture(params=["of this repository", "of another package"])
def registered(request: pytest.FixtureRequest, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one line of registration, in either of the two places."""
    if request.param == "of this repository":
        monkeypatch.setitem(registry.BUILTIN, "tmp_method", "tmp_method:TmpMethod")
        return
    entry = EntryPoint("tmp_method", "tmp_method:TmpMethod", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    registry._third_party.cache_clear()


@pytest.mark.usefixtures("registered")
def test_list_and_explain_show_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    list_methods()
    (line,) = (row for row in capsys.readouterr().out.splitlines() if "tmp_method" in row)
    assert "texts of one word" in line
    explain("tmp_method")
    shown = capsys.readouterr().out
    assert "tmp_method: Says the last token again." in shown
    assert "copies: integer 1..5; default 2\n      How often the last token is said again." in shown
    explain("tmp_method", as_json=True)
    schema = json.loads(capsys.readouterr().out)
    assert schema["num_speculative_tokens"] == 3
    assert schema["options"]["properties"]["copies"]["maximum"] == 5


@pytest.mark.usefixtures("registered")
def test_the_engine_and_the_commands_check_its_options() -> None:
    parsed = parse_method({"method": "tmp_method", "copies": 4}, "tmp_method")
    assert parsed.options.model_dump() == {"adaptive_length": True, "copies": 4}
    assert parsed.vllm_options["num_speculative_tokens"] == 3
    with pytest.raises(UnknownNameError, match=r"option of tmp_method.*Did you mean 'copies'"):
        parse_method({"method": "tmp_method", "copys": 4}, "tmp_method")
    with pytest.raises(SpecExtError, match=r"copies: .*less than or equal to 5; found 9"):
        parse_method({"method": "tmp_method", "copies": 9}, "tmp_method")
    config = speculative_config("tmp_method", {"copies": 4}, None)
    assert config == {"method": "tmp_method", "copies": 4}


@pytest.mark.usefixtures("registered")
def test_recordings_are_replayed_through_it() -> None:
    (point,) = make_points("tmp_method", [{"copies": 2}])
    assert isinstance(point, Point)
    recordings = [Recording([1], np.full(7, 5).tolist())]
    result = run_point("tmp_method", point, recordings, None, "", 1)
    assert result.num_tokens == 6
    assert result.num_steps == 2  # two drafted tokens and the bonus token each


def test_docs_and_navigation_show_it(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert docs_tables.outdated(docs) == {}
    monkeypatch.setitem(registry.BUILTIN, "tmp_method", "tmp_method:TmpMethod")
    with pytest.raises(SpecExtError, match=r"'tmp_method' has no page; expected .*tmp_method\.md"):
        docs_tables.outdated(docs)
    (docs / "tmp_method.md").write_text(PAGE)
    assert docs_tables.main(["--write", str(docs)]) == 0
    assert docs_tables.main(["--check", str(docs)]) == 0
    row = "no | yes | texts of one word | next to nothing |"
    assert f"[`tmp_method`](docs/tmp_method.md) | {row}" in (docs.parent / "README.md").read_text()
    row = "| [`tmp_method`](tmp_method.md) | Says the last token again. |"
    assert row in (docs / "index.md").read_text()
    row = (
        "| texts of one word | [`tmp_method`](tmp_method.md) | none | Says the last token again. |"
    )
    assert row in (docs / "methods.md").read_text()
    entry = "      - Tmp method: tmp_method.md\n      # end of methods\n"
    assert entry in (docs.parent / "mkdocs.yml").read_text()
    row = "| `copies` | integer 1..5 | `2` | How often the last token is said again. |"
    assert row in (docs / "tmp_method.md").read_text()


def test_docs_do_not_depend_on_what_else_is_installed(
    docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("tmp_method", "tmp_method:TmpMethod", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    registry._third_party.cache_clear()
    assert docs_tables.outdated(docs) == {}
    # Its own docs may have a table of its options all the same.
    assert "| `copies` |" in docs_tables.with_tables(PAGE, docs)


def test_an_unknown_kind_of_table_is_refused(docs: Path) -> None:
    page = "<!-- methods: overvew -->\n<!-- end of methods -->"
    with pytest.raises(UnknownNameError, match="Did you mean 'overview'"):
        docs_tables.with_tables(page, docs)
