# SPDX-License-Identifier: Apache-2.0
"""Methods with draft models on the V2 runner: trees, cascades, EAGLE-3 heads, block drafters.

The tests of V1, one of each kind; only the scenarios are fewer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_cascade_engine as cascades
import test_eagle3
import test_nar_engine as nar
import test_token_tree_engine as trees
from save_dflash import save_dflash
from save_drafts import save_draft
from test_cascade_engine import Watch, watch
from test_eagle3 import walker
from test_nar_engine import records
from test_token_tree_engine import outcomes

__all__ = ["outcomes", "records", "walker", "watch"]

FREE = ("mixed_lengths", "several_samples")


@pytest.fixture(scope="module")
def drafts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    other = save_draft(tiny_model, folder / "other", num_hidden_layers=1)
    return {"self": str(tiny_model), "other": other}


def engines(make_engine: Any, module: Any, drafts: dict[str, str]) -> Callable[[str], Any]:
    """Those of a module's tests."""
    return lambda name: make_engine(
        speculative_config=module.with_folders(module.METHODS[name], drafts)
    )


@pytest.mark.parametrize("name", ["expansion", "merged"])
def test_trees_of_models(
    name: str,
    make_engine: Any,
    drafts: dict[str, str],
    expected: Any,
    outcomes: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backwards: what is accepted lies in scratch blocks."""
    monkeypatch.setattr(trees, "FREE", FREE)
    trees.test_the_target_accepts_all_of_itself(
        name, True, engines(make_engine, trees, drafts), expected, outcomes, monkeypatch
    )


@pytest.mark.parametrize("name", ["copies", "horizontal"])
def test_cascades(
    name: str,
    make_engine: Any,
    drafts: dict[str, str],
    expected: Any,
    watch: Watch,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cascades, "FREE", FREE)
    cascades.test_the_target_accepts_all_of_itself(
        name, engines(make_engine, cascades, drafts), expected, watch, tiny_model
    )


def test_eagle3_heads_read_the_right_hidden_states(
    make_engine: Any, walker: tuple[str, str]
) -> None:
    """Of layers of the target, from rows of a tree, after preemption and prefix hits."""
    test_eagle3.test_the_right_hidden_states_are_read("fork", 16, make_engine, walker)


def test_block_drafts_by_definition(
    make_engine: Any, tiny_model: Path, tmp_path: Path, records: Any
) -> None:
    drafters = {"extras": save_dflash(tiny_model, tmp_path / "extras", **nar.KINDS["extras"])}
    config = {"method": "nar", "adaptive_length": False, **nar.METHODS["all_tree"]}
    config["model"] = drafters["extras"]
    nar.test_drafts_by_definition(
        "all_tree",
        lambda name: make_engine(speculative_config=config),
        drafters,
        tiny_model,
        records,
    )
