# SPDX-License-Identifier: Apache-2.0
"""A number hidden in a text: a retrieval view keeps its pages in sight, a stream loses them.

On the real small model, whose answers hold the number; it is the published measurement, cut short.
"""

import importlib.util
import json
from pathlib import Path
from statistics import mean

import pytest
from fenced_blocks import ROOT
from forked_programs import run_forked
from published_runs import environment, model_folder

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

NEEDLES = 2
BUDGET = "512"


def test_a_retrieval_view_finds_what_a_stream_loses(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    script = str(ROOT / "scripts/view_acceptance.py")
    what = ["--needles", str(NEEDLES), "--lengths", "2k", "--budgets", BUDGET]
    done = run_forked(
        [script, model_folder(), *what, "--max-tokens", "24", "--out", str(out)],
        environment(),
        timeout=500,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    found = {(part, view): rates for _, part, view, rates in json.loads(out.read_text())}
    assert len(found["all", f"retrieval {BUDGET}"]) == NEEDLES  # the target found all of them
    for part in ("all", "digits"):
        assert mean(found[part, f"retrieval {BUDGET}"]) >= 0.95, found
    assert mean(found["digits", f"stream {BUDGET}"]) <= 0.5, found
