# SPDX-License-Identifier: Apache-2.0
"""Fenced code blocks of the README and the docs, and the shell commands in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str  # path relative to the repository
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    """All blocks in these languages, in reading order, page by page."""
    return [
        Block(str(page.relative_to(ROOT)), found[1], found[2])
        for page in PAGES
        for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))
        if found[1] in languages
    ]


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line of every ``bash`` block, joined over backslashes and quotes."""
    result = []
    for block in blocks("bash"):
        pending = ""
        for line in block.text.splitlines():
            if not pending and (not line.strip() or line.startswith("#")):
                continue
            pending += line.removesuffix("\\") if line.endswith("\\") else line + "\n"
            if line.endswith("\\") or pending.count("'") % 2:
                continue
            result.append((block.page, pending.strip()))
            pending = ""
        assert not pending, f"{block.page}: unfinished command {pending!r}"
    return result
