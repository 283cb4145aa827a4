# SPDX-License-Identifier: Apache-2.0
"""The checks of ``make gpu-check`` that look into the V2 runner, as far as a CPU can run them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_check import builders, default, graphs, identity, late
from gpu_check.site import CheckFailed, Site


@pytest.fixture(scope="module")
def site(make_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(make_engine, Path(tmp_path_factory.mktemp("checks")), on_gpu=False)


def test_asynchronous_steps(site: Site) -> None:
    found = identity.identity_async(site)
    assert found["compared"] > 400
    assert found["steps"]["oracle"]["sync"] > 10


def test_seeded_trees(site: Site) -> None:
    found = identity.seeded_trees(site)
    assert found["compared"] > 100
    assert found["drafts"]["oracle_tree"]["accepted"] > 50


@pytest.mark.parametrize(
    "check", [late.late_tables, late.late_heads, late.late_ngram, late.late_auto]
)
def test_late_drafts(check: Callable[[Site], dict[str, Any]], site: Site) -> None:
    found = check(site)
    assert found["compared"] > 400
    assert all(
        40 < steps < 0.8 * found["compared"] / 2 for steps in found["request_steps"].values()
    )
    assert found["draft_us"] > 0


def test_trees_wider_than_the_engine(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    short = builders.Scenario([{"max_tokens": 16, "ignore_eos": True}], builders.PROMPTS)
    monkeypatch.setattr(builders, "SCENARIO", short)
    monkeypatch.setattr(builders, "CONTROLS", (builders.no_commit,))
    found = builders.triton_attention(site)
    assert found["compared"] > 100
    assert found["controls"]["no_commit"] > 0


def test_drafts_in_16_bits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    short = builders.Scenario(
        [{"max_tokens": 12, "ignore_eos": True, "logprobs": 5}], builders.PROMPTS[:2]
    )
    monkeypatch.setattr(builders, "SCENARIO", short)
    found = graphs.flash_attention_graphs(site)
    assert found["chains"]["compared"] > 12
    assert found["async_chains"]["compared"] > 12
    monkeypatch.setattr(builders, "BFLOAT16_TOLERANCE", 0.0)
    with pytest.raises(CheckFailed, match="a log-probability differs"):
        graphs.flash_attention_graphs(site)


def test_graphs_of_the_v2_runner_are_counted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    short = graphs.Scenario([{"max_tokens": 30, "ignore_eos": True}], graphs.PROMPTS)
    monkeypatch.setattr(graphs, "SCENARIO", short)
    with pytest.raises(CheckFailed, match="PIECEWISE graphs") as caught:
        graphs.full_graphs(site)
    assert caught.value.found["trees"]["NONE with tree"] > 5


def test_the_default_on_a_gpu(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    found = default.gpu_default(site)
    assert found["compared"] > 1000
    assert found["design"]["drafts"] == "on the device"
    waits = site.engine(speculative_config={"method": "input_copy", "num_speculative_tokens": 8})
    monkeypatch.setattr(default, "_by_default", lambda site: waits)
    with pytest.raises(CheckFailed, match=r"found .*on the host.*, expected .*WidthScheduler"):
        default.gpu_default(site)
