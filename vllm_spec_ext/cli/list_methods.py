# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec list``: every method and what it is good for."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers import registry


def list_methods() -> None:
    """The speculative methods of this plugin and of packages that extend it."""
    table = Table(title="Speculative methods", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("method", "lossless", "training", "drafts", "k", "best for, and cost"):
        table.add_column(heading, no_wrap=heading == "method")
    broken: list[str] = []
    for name in registry.names():
        try:
            found = registry.info(name)
        except (SpecExtError, ImportError) as error:
            # One broken extension must not hide the methods that work.
            broken.append(f"{name}: {error}")
            continue
        table.add_row(
            name,
            "yes" if found.lossless else "no",
            "needed" if found.needs_checkpoint else "none",
            "tree" if found.tree else "chain",
            "-" if found.num_speculative_tokens is None else str(found.num_speculative_tokens),
            Text("\n".join(filter(None, [found.best_for, found.cost])) or "-"),  # no markup
        )
    console = Console()
    console.print(table)
    console.print("k: default num_speculative_tokens. Options of one: vllm-spec explain METHOD")
    for line in broken:
        Console(stderr=True, soft_wrap=True).print(f"not available: {line}", markup=False)
