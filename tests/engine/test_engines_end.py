# SPDX-License-Identifier: Apache-2.0
"""An engine that nobody needs any more is gone, with all that we added to it.

So programs, and these tests, can have one engine after another in a process.
"""

from pathlib import Path
from typing import Any

import pytest
from engine_parts import EngineParts
from generation import run
from save_eagle3 import save_eagle3
from scenarios import SCENARIOS
from test_blockwise_engine import save_random_heads
from tiny_engine import start_engine

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},  # else what follows would be vLLM's doing
    "chain": {"method": "input_copy", "num_speculative_tokens": 8},
    "tree": {"method": "oracle", "num_speculative_tokens": 12, "branches": 4},
    "heads": {"method": "blockwise", "num_speculative_tokens": 3, "draw": True},
    "model": {"method": "small_model", "num_speculative_tokens": 4},
    "eagle": {"method": "token_tree", "expansion": [2, 1], "num_speculative_tokens": 8},
    "lossy": {
        "method": "input_copy",
        "num_speculative_tokens": 8,
        "scorer": {"type": "top_k", "k": 2},
        "allow_lossy": True,
    },
}


@pytest.mark.usefixtures("_one_process_many_engines")
@pytest.mark.parametrize("name", METHODS)
def test_nothing_of_it_stays(name: str, tiny_model: Path, tmp_path: Path) -> None:
    config = dict(METHODS[name])
    if name == "heads":
        config["model"] = str(save_random_heads(tmp_path / "heads"))
    elif name == "model":
        config["model"] = str(tiny_model)
    elif name == "eagle":
        config["models"] = [save_eagle3(tiny_model, tmp_path / "head"), str(tiny_model)]
    engine = start_engine(tiny_model, speculative_config=config or None)
    knows = config.get("method") == "oracle"
    scenario = SCENARIOS["mixed_lengths"]
    run(engine, scenario, [[1, 2, 3]] * len(scenario.prompts) if knows else None)
    parts = EngineParts(engine)
    assert len(parts.left()) > 4
    del engine
    assert parts.left() == []
