# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks give the tokens of one: rank 0 drafts, the other follows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from generation import run, tokens
from scenarios import SCENARIOS
from test_blockwise_engine import save_random_heads

METHODS: dict[str, dict[str, Any]] = {
    "chain": {"method": "input_copy", "num_speculative_tokens": 8},
    "tree": {"method": "adaptive_ngram", "num_speculative_tokens": 12, "min_confidence": 0.0},
    "heads": {"method": "blockwise", "num_speculative_tokens": 3},
    "drawn_heads": {"method": "blockwise", "num_speculative_tokens": 3, "draw": True},
}
NAMES = ("mixed_lengths", "seeded", "few_tokens")


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> dict[str, Any]:
    """What one rank generates without speculation."""
    engine = make_engine(max_num_batched_tokens=2048)
    return {name: tokens(run(engine, SCENARIOS[name])) for name in NAMES}


@pytest.fixture(scope="module", params=METHODS)
def found(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What two ranks did with a method, in processes of their own."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    folder = tmp_path_factory.mktemp("parallel")
    config = {
        **METHODS[request.param],
        "adaptive_length": False,
    }  # no clock decides what is drafted
    if config["method"] == "blockwise":
        vocab = [40, 42, 44]  # those of the scenario "few_tokens"
        config["model"] = str(save_random_heads(folder / "heads", vocab, copy_match=4))
    engine = {
        "model": str(tiny_model),
        "speculative_config": config,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 160,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
        "kv_cache_memory_bytes": 32 << 20,
        "disable_log_stats": False,
        "seed": 0,
    }
    results = folder / "results.json"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "parallel_run.py")],
        input=json.dumps({"engine": engine, "results": str(results)}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert results.is_file(), (done.stdout + done.stderr)[-8000:]
    return json.loads(results.read_text())


def test_same_tokens_as_one_rank(found: dict[str, Any], plain: dict[str, Any]) -> None:
    for scenario in NAMES:
        assert found[scenario] == plain[scenario], scenario
    assert found["again"] == plain["mixed_lengths"]  # after the proposer was built anew


def test_one_rank_drafts(found: dict[str, Any]) -> None:
    leader, follower = found["timed"]
    assert leader > 50
    assert follower == 0
    assert found["accepted"] > 10  # untrained heads copy, and little more


def test_ranks_draw_alike(found: dict[str, Any]) -> None:
    """Without seeds, both ranks sample from global generators that must stay the same."""
    one, other = found["random"]
    assert one == other
