# SPDX-License-Identifier: Apache-2.0
"""The heads that come with the package, on the model they were trained for."""

import importlib.util
import json
from pathlib import Path

import pytest
from published_runs import model_folder, vllm_spec

from vllm_spec_ext.cli.demo_heads import demo_heads

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


def test_they_are_small() -> None:
    assert sum(file.stat().st_size for file in demo_heads().iterdir()) < 8_000_000


def test_chain_and_tree_raise_tokens_per_step_and_change_no_answer(tmp_path: Path) -> None:
    heads = {"method": "blockwise", "model": str(demo_heads()), "adaptive_length": False}
    settings = {
        "model": model_folder(),
        "methods": {
            "plain": None,
            "chain": heads,
            "tree": {**heads, "tree": True, "num_speculative_tokens": 12},
        },
        "limit": 4,
        "max_tokens": 48,
        "repeats": 1,
        "dtype": "float32",
    }
    config, result = tmp_path / "bench.json", tmp_path / "result.json"
    config.write_text(json.dumps(settings))
    done = vllm_spec("bench", "--config", str(config), "--json", str(result))
    assert done.returncode == 0, done.stderr  # float32: every answer identical
    rows = {row["method"]: row for row in json.loads(result.read_text())["summaries"]}
    assert rows["chain"]["tokens_per_step"] > 1.3
    assert rows["tree"]["tokens_per_step"] > rows["chain"]["tokens_per_step"]
