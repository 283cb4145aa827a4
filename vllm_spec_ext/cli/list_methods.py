# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec list``: every method and what it is good for."""

from rich.console import Console

from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers import registry


def list_methods() -> None:
    """The speculative methods of this plugin and of packages that extend it."""
    headings = ["method", "lossless", "training", "drafts", "k", "best for, and cost"]
    rows: list[list[str]] = []
    broken: list[str] = []
    for name in registry.names():
        try:
            found = registry.info(name)
        except (SpecExtError, ImportError) as error:
            # One broken extension must not hide the methods that work.
            broken.append(f"{name}: {error}")
            continue
        k = found.num_speculative_tokens
        rows.append(
            [
                name,
                "yes" if found.lossless else "no",
                "needed" if found.needs_checkpoint else "none",
                "tree" if found.tree else "chain",
                "-" if k is None else str(k),
                "\n".join(filter(None, [found.best_for, found.cost])) or "-",
            ]
        )
    console = Console()
    title = "Speculative methods"
    WholeTable(headings, rows, title, left=len(headings), wrap=True).print(console)
    line = "k: default num_speculative_tokens. Options of one: vllm-spec explain METHOD"
    console.print(line, soft_wrap=True)
    for line in broken:
        Console(stderr=True, soft_wrap=True).print(f"not available: {line}", markup=False)
