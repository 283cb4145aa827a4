# SPDX-License-Identifier: Apache-2.0
"""`vllm-spec explain-step` on the real small model, as a user calls it."""

import importlib.util
import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from published_runs import model_folder, vllm_spec

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(
        not any(entry.name == "spec_ext" for entry in entry_points(group="vllm.general_plugins")),
        reason="needs this package installed, so that vLLM finds its entry point",
    ),
]


def test_a_step_of_a_real_request(tmp_path: Path) -> None:
    model = model_folder()
    svg = tmp_path / "tree.svg"
    done = vllm_spec(
        *("explain-step", "--json", "--model", model, "--max-tokens", "24", "--svg", str(svg)),
        *("--prompt", "Repeat this line three times: one two three one two three"),
        forked=True,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    nodes, new = len(shown["tokens"]), shown["new_tokens"]
    assert nodes == len(shown["parents"]) == len(shown["path_probs"]) == len(shown["texts"]) > 0
    # What stands is what the target said, token by token.
    assert [shown["tokens"][node] for node in shown["accepted"]] == new[:-1]
    assert svg.read_text(encoding="utf-8").startswith("<svg")
