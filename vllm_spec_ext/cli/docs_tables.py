# SPDX-License-Identifier: Apache-2.0
"""Tables of the docs, from schemas, registry and runs: ``python -m vllm_spec_ext.cli.docs_tables``.

A page marks where a table goes; what stands between the two marks is replaced::

    <!-- options: input_copy -->
    <!-- end of options -->

    <!-- measured: FILE input_copy -->
    <!-- end of measured -->

    <!-- methods: overview -->
    <!-- end of methods -->

``request options: METHOD`` gives the per-request options instead, ``options: online`` those of
``online``. ``measured`` reads
``measured/FILE.json`` of the same folder, which ``vllm-spec report --summary`` wrote; without a
method it gives the table of all. ``methods`` lists the built-in methods, see
:func:`~vllm_spec_ext.cli.method_docs.methods_table`. In ``mkdocs.yml`` their navigation entries
stand between ``# methods`` and ``# end of methods``.

``--write docs`` rewrites the pages of that folder, and ``README.md`` and ``mkdocs.yml`` beside it;
``--check docs`` exits with 1 if that would change one.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_spec_ext.bench.markdown_table import markdown_table
from vllm_spec_ext.cli.measured_tables import all_methods_tables, method_table, read_summary
from vllm_spec_ext.cli.method_docs import methods_table, nav_entries
from vllm_spec_ext.cli.option_docs import option_docs
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import OnlineOptions, Options
from vllm_spec_ext.proposers import registry

END = "<!-- end of options -->"
END_MEASURED = "<!-- end of measured -->"
END_METHODS = "<!-- end of methods -->"
_OPTIONS = re.compile(rf"<!-- (request )?options: ([\w-]+) -->\n.*?{END}", re.DOTALL)
_MEASURED = re.compile(rf"<!-- measured: ([\w-]+)(?: ([\w-]+))? -->\n.*?{END_MEASURED}", re.DOTALL)
_METHODS = re.compile(rf"<!-- methods: ([\w-]+) -->\n.*?{END_METHODS}", re.DOTALL)
_NAV = re.compile(r"^( *)# methods\n.*?^ *# end of methods$", re.DOTALL | re.MULTILINE)


def option_table(schema: type[Options]) -> str:
    """The options of a schema as a Markdown table."""
    rows = [
        [
            f"`{doc.name}`",
            doc.type,
            doc.default if doc.default == "required" else f"`{doc.default}`",
            doc.text,
        ]
        for doc in option_docs(schema)
    ]
    return markdown_table(["option", "type", "default", "meaning"], rows)


def with_tables(page: str, folder: Path, prefix: str = "") -> str:
    """A page with its tables brought up to date.

    Args:
        page: Its text.
        folder: With ``measured/`` and the pages of the methods.
        prefix: From the page to that folder, for links.

    Raises:
        UnknownNameError: A mark names a method or a kind of table that does not exist.
        SpecExtError: A mark names a measurement that does not exist or lacks the method, or a
            method has no page.
    """

    def table(mark: re.Match[str]) -> str:
        schema: type[Options] = OnlineOptions
        if mark[2] != "online":
            found = registry.info(mark[2])
            schema = found.request_options if mark[1] else found.options
        head = f"<!-- {mark[1] or ''}options: {mark[2]} -->"
        return f"{head}\n{option_table(schema)}\n{END}"

    def figures(mark: re.Match[str]) -> str:
        found = read_summary(folder / "measured" / f"{mark[1]}.json")
        head = f"<!-- measured: {mark[1]}{f' {mark[2]}' if mark[2] else ''} -->"
        body = method_table(found, mark[2]) if mark[2] else all_methods_tables(found)
        return f"{head}\n{body}\n{END_MEASURED}"

    def methods(mark: re.Match[str]) -> str:
        body = methods_table(mark[1], folder, prefix)
        return f"<!-- methods: {mark[1]} -->\n{body}\n{END_METHODS}"

    for marks, tables in ((_OPTIONS, table), (_MEASURED, figures), (_METHODS, methods)):
        page = marks.sub(tables, page)
    return page


def with_nav(configuration: str, folder: Path) -> str:
    """The text of ``mkdocs.yml`` with the navigation entries of the methods; raises alike."""

    def entries(mark: re.Match[str]) -> str:
        lines = ["# methods", *nav_entries(folder), "# end of methods"]
        return "\n".join(mark[1] + line for line in lines)

    return _NAV.sub(entries, configuration)


def outdated(folder: Path) -> dict[Path, str]:
    """Files whose tables are out of date, with their new text.

    Args:
        folder: With the pages; ``README.md`` and ``mkdocs.yml`` beside it are looked at, too.

    Raises:
        SpecExtError: There is no such folder; or as :func:`with_tables`.
    """
    if not folder.is_dir():
        raise SpecExtError(f"found no folder {str(folder)!r}; expected the one with the docs")
    beside = folder.absolute().parent
    readme, configuration = beside / "README.md", beside / "mkdocs.yml"
    pages = [*sorted(folder.glob("*.md")), readme, configuration]
    old = {page: page.read_text(encoding="utf-8") for page in pages if page.is_file()}
    changed = {}
    for page, text in old.items():
        if page == configuration:
            new = with_nav(text, folder)
        else:
            new = with_tables(text, folder, f"{folder.name}/" if page == readme else "")
        if new != text:
            changed[page] = new
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Tables of the docs.")
    parser.add_argument("--write", action="store_true", help="rewrite the pages (default: check)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is out of date")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    try:
        pages = outdated(given.folder)
    except SpecExtError as error:
        print(f"docs_tables: {error}", file=sys.stderr)
        return 2
    for page, text in pages.items():
        if given.write:
            page.write_text(text, encoding="utf-8")
        print(f"{page}: {'written' if given.write else 'out of date; run again with --write'}")
    return 0 if given.write or not pages else 1


if __name__ == "__main__":
    sys.exit(main())
