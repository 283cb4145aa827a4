# SPDX-License-Identifier: Apache-2.0
"""Tables of the built-in methods, and their part of the site's navigation, from the registry.

A method describes itself in its ``@proposer`` decorator, and has one page ``NAME.md``. Methods of
other packages are left out: the docs must not depend on what is installed beside this package.
"""

from pathlib import Path

from vllm_spec_ext.bench.markdown_table import markdown_table
from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import ProposerInfo

TABLES = ("overview", "which", "pages")


def methods_table(kind: str, docs: Path, prefix: str = "") -> str:
    """All built-in methods as a Markdown table.

    Args:
        kind: ``overview`` (all that a reader compares), ``which`` (by what the text is like) or
            ``pages`` (the page of each method, and what it does).
        docs: Folder with a page for each method.
        prefix: From the page with the table to that folder, e.g. ``docs/``.

    Raises:
        UnknownNameError: No such kind of table.
        SpecExtError: A method without a page.
    """
    if kind not in TABLES:
        raise UnknownNameError("table of methods", kind, TABLES)
    methods = _methods(docs)
    links = [f"[`{method.name}`]({prefix}{method.name}.md)" for method in methods]
    if kind == "overview":
        headings = ["method", "needs training?", "lossless?", "best for", "cost"]
        columns = [
            links,
            ["yes" if method.needs_checkpoint else "no" for method in methods],
            ["yes" if method.lossless else "no" for method in methods],
            [method.best_for for method in methods],
            [method.cost for method in methods],
        ]
    elif kind == "which":
        headings = ["your text", "method", "training", "how it drafts"]
        columns = [
            [method.best_for for method in methods],
            links,
            ["needed" if method.needs_checkpoint else "none" for method in methods],
            [method.summary for method in methods],
        ]
    else:
        headings = ["method", "what it does"]
        columns = [links, [method.summary for method in methods]]
    return markdown_table(headings, [list(row) for row in zip(*columns, strict=True)])


def nav_entries(docs: Path) -> list[str]:
    """Entries ``Title: NAME.md`` of ``nav`` in ``mkdocs.yml``; raises as :func:`methods_table`."""
    return [
        f"- {method.name.replace('_', ' ').capitalize()}: {method.name}.md"
        for method in _methods(docs)
    ]


def _methods(docs: Path) -> list[ProposerInfo]:
    for name in registry.BUILTIN:
        if not (docs / f"{name}.md").is_file():
            raise SpecExtError(
                f"method {name!r} has no page; expected {str(docs / f'{name}.md')!r}"
            )
    return [registry.info(name) for name in registry.BUILTIN]
