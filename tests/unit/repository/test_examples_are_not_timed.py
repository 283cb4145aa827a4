# SPDX-License-Identifier: Apache-2.0
"""Hypothesis fails an example that takes 0.2 s, which says something of the machine alone."""

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]


def test_no_example_has_a_deadline() -> None:
    drawn, timed = 0, []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                said = [ast.unparse(one) for one in node.decorator_list]
                is_drawn = any(one.startswith("given(") for one in said)
                drawn += is_drawn
                if is_drawn and not any("deadline=None" in one for one in said):
                    timed.append(f"{path.relative_to(TESTS)}: {node.name}")
    assert drawn > 20
    assert not timed, "give them @settings(deadline=None)"
