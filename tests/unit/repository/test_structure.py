# SPDX-License-Identifier: Apache-2.0
"""What is mixed into vLLM's runners stays a list of short overrides; the work is done elsewhere."""

import ast
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[3] / "vllm_spec_ext" / "engine"


@pytest.mark.parametrize(
    ("module", "name"),
    [("runner.py", "SpecRunnerMixin"), ("v2/runner.py", "SpecRunnerV2Mixin")],
)
def test_the_mixins_are_short(module: str, name: str) -> None:
    tree = ast.parse((ENGINE / module).read_text())
    mixin = next(one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)
    assert mixin.end_lineno is not None
    assert mixin.end_lineno - mixin.lineno + 1 < 200
    for method in mixin.body:
        if isinstance(method, ast.FunctionDef):
            assert method.end_lineno is not None
            assert method.end_lineno - method.lineno + 1 <= 40, method.name
