# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks on the V2 runner: the tests of V1, for a tree; and late drafts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_tensor_parallel as parallel
from generation import run, tokens
from scenarios import SCENARIOS
from test_blockwise_engine import save_random_heads
from test_tensor_parallel import engines, found

__all__ = ["engines", "found"]


@pytest.fixture(scope="module")
def one_rank(make_engine: Any) -> dict[str, Any]:
    engine = make_engine(max_num_batched_tokens=2048)
    return {name: tokens(run(engine, SCENARIOS[name])) for name in parallel.NAMES}


@pytest.mark.parametrize("found", ["tree"], indirect=True)
def test_same_tokens_as_one_rank(found: dict[str, Any], one_rank: dict[str, Any]) -> None:
    parallel.test_same_tokens_as_one_rank(found, one_rank)
    parallel.test_one_rank_drafts(found)
    parallel.test_ranks_draw_alike(found)


@pytest.fixture(scope="module", params=["copies", "heads"])
def late(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    engines: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What two ranks did where rank 0 drafts on its device; heads take layers of both."""
    config: dict[str, Any] = {"method": "auto", "num_speculative_tokens": 8}
    if request.param == "heads":
        folder = save_random_heads(tmp_path_factory.mktemp("heads") / "heads", [40, 42, 44], 4)
        config = {"method": "blockwise", "model": str(folder), "num_speculative_tokens": 3}
    return engines(model=str(tiny_model), speculative_config=config, async_scheduling=True)


def test_late_drafts_of_one_rank_are_those_of_both(
    late: dict[str, Any], one_rank: dict[str, Any]
) -> None:
    parallel.test_same_tokens_as_one_rank(late, one_rank)
    parallel.test_one_rank_drafts(late)
    parallel.test_ranks_draw_alike(late)
    assert late["scheduled"] == ["late", "late"]
