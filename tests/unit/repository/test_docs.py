# SPDX-License-Identifier: Apache-2.0
"""README and docs agree with the code and with each other."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_bench_report import _result

from vllm_spec_ext.bench import provenance
from vllm_spec_ext.bench.saved import SavedBench, to_json
from vllm_spec_ext.cli.docs_tables import (
    END,
    END_MEASURED,
    main,
    option_table,
    outdated,
    with_tables,
)
from vllm_spec_ext.cli.main import main as command_line
from vllm_spec_ext.cli.method_docs import methods_table, nav_entries
from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = _FENCED.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_of_a_merge_is_left(page: Path) -> None:
    found = re.findall(r"^(?:<{7}|>{7}|\|{7}|={7}) ?.*$", page.read_text(), re.MULTILINE)
    assert found == []


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    assert [p.name for p in DOCS.glob("*.md") if p.name != "index.md" and p.name not in index] == []


def test_readme_is_short_and_lists_every_method() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 200
    methods = (DOCS / "methods.md").read_text()
    for name in registry.BUILTIN:
        assert f"`{name}`" in text
        assert f"`{name}`" in methods


def test_tables_are_those_of_schemas_and_registry() -> None:
    assert outdated(DOCS) == {}, "run: python -m vllm_spec_ext.cli.docs_tables --write docs"
    assert option_table(InputCopyOptions) in (DOCS / "input_copy.md").read_text()
    assert methods_table("overview", DOCS, "docs/") in (ROOT / "README.md").read_text()
    assert methods_table("which", DOCS) in (DOCS / "methods.md").read_text()
    assert methods_table("pages", DOCS) in (DOCS / "index.md").read_text()
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"      {entry}\n" in navigation for entry in nav_entries(DOCS))


def test_tables_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"a\n<!-- request options: input_copy -->\nold\n{END}\nz\n")
    assert main(["--check", str(tmp_path)]) == 1
    assert main(["--write", str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    lines = page.read_text().splitlines()
    assert lines[0] == "a"
    assert lines[-1] == "z"
    assert any(line.startswith("| `source_span` | [integer, integer] or null |") for line in lines)
    assert main(["--check", str(tmp_path / "none")]) == 2
    assert "found no folder" in capsys.readouterr().err
    with pytest.raises(UnknownNameError, match="Did you mean 'input_copy'"):
        with_tables(f"<!-- options: input_cpy -->\n{END}", tmp_path)


def test_measured_tables_come_from_a_run_without_its_texts(tmp_path: Path) -> None:
    result = _result()
    models = ["/secret/one", {"model": "/secret/other"}]
    result.methods = [
        replace(method, config={**method.config, "models": models}) if method.config else method
        for method in result.methods
    ]
    saved = SavedBench("run", result, provenance.collect(["vllm-spec", "bench", "/secret/path"]))
    run_file, summary = tmp_path / "run.json", tmp_path / "measured" / "here.json"
    run_file.write_text(json.dumps(to_json(result, saved.provenance)))
    with pytest.raises(SystemExit) as stop:
        command_line(["report", str(run_file), "--summary", str(summary)])
    assert stop.value.code == 0
    written = summary.read_text()
    assert "/secret" not in written
    assert "content" not in written
    page = with_tables(f"<!-- measured: here -->\n{END_MEASURED}\n", tmp_path)
    assert "copy 1 prompts; up to 128 tokens, float32, temperature 0, 3 passes; " in page
    assert "| `ngram` | 1 | 3.00 | 4.0 | 2.00x | 2.11x | 100 | 300.0 |  | 1 of 1 |" in page
    assert "| `ngram` | 1 | 3.00, 2.00x |" in page
    assert with_tables(page, tmp_path) == page
    page = with_tables(f"<!-- measured: here plain -->\n{END_MEASURED}", tmp_path)
    assert "| copy | 1.00, 1.00x | 3.00, 2.00x |" in page
    with pytest.raises(SpecExtError, match="'input_copy' was not measured; found plain, ngram"):
        with_tables(f"<!-- measured: here input_copy -->\n{END_MEASURED}", tmp_path)
    with pytest.raises(SpecExtError, match="cannot read"):
        with_tables(f"<!-- measured: there -->\n{END_MEASURED}", tmp_path)


def test_shown_proposer_is_the_example() -> None:
    code = (ROOT / "examples/custom_proposer/repeat_proposer.py").read_text()
    assert f"```python\n{code}```" in (DOCS / "adding_a_proposer.md").read_text()


def messages() -> list[str]:
    """Every text literal of the package, joined over f-string values."""
    found = []
    for folder in ("vllm_spec_ext", "proposers", "scorers"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", "") for part in node.values]
                    found.append("".join(p if isinstance(p, str) else "\0" for p in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_errors_explained_in_troubleshooting_exist() -> None:
    texts = messages()
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) > 20
    for heading in headings:
        parts = [part.strip() for part in heading.split("...")]
        for part in parts:
            assert any(part in text for text in texts), f"{heading}: {part}"
