# SPDX-License-Identifier: Apache-2.0
"""The checks of ``make gpu-check`` as far as a CPU can run them, and that they can fail.

Backends and CUDA graphs are what a GPU would bring; here they have one backend and no graphs.
"""

from pathlib import Path
from typing import Any

import pytest
from test_greedy_identity import runner_of

from gpu_check import alone, builders, draft_passes, graphs, identity, relaxed
from gpu_check.site import CheckFailed, Site
from vllm_spec_ext.bench.engine_client import EngineFailed


@pytest.fixture(scope="module")
def site(make_engine: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("checks")
    (folder / "tiny").symlink_to(tiny_model)
    return Site(make_engine, folder, on_gpu=False, small_model=str(tiny_model))


def test_identity(site: Site) -> None:
    found = identity.compare(site, ("mixed_lengths",), ("oracle_tree", "input_copy"))
    assert found["compared"] > 200
    assert found["drafts"]["oracle_tree"]["accepted"] > 20


def test_identity_fails_where_nothing_is_accepted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "firsts", lambda outputs: [[] for _ in outputs])
    with pytest.raises(CheckFailed, match="oracle_tree: 0 of 0 draft tokens were accepted"):
        identity.compare(site, ("mixed_lengths",), ("oracle_tree",))


def test_the_small_model(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"max_model_len": 160, "max_num_seqs": 4}
    monkeypatch.setattr(identity, "SMALL_SIZES", sizes)
    monkeypatch.setattr(identity, "SMALL_TOKENS", 24)
    monkeypatch.setattr(identity, "SMALL_METHODS", {"input_copy": {"method": "input_copy"}})
    found = identity.identity_small(site)
    assert found["compared"] > 100
    assert found["steps"]["input_copy"] > 10


def test_trees_wider_than_the_engine_in_float32(site: Site) -> None:
    found = builders.triton_attention(site)
    assert found["compared"] > 300
    assert found["most_virtual_requests"] > 8
    assert all(found["controls"].values())


def test_trees_wider_than_the_engine_in_bfloat16(site: Site) -> None:
    found = builders.flash_attention(site)
    assert found["compared"] > 4 * 48
    assert found["largest_difference"] < builders.BFLOAT16_TOLERANCE


def test_builders_fail_where_trees_are_narrow(site: Site) -> None:
    with pytest.raises(CheckFailed, match="1 steps had more than 2 virtual requests"):
        builders.TreeRun([], [1, 2, 3]).facts()
    with pytest.raises(CheckFailed, match="control no_commit"):
        builders.require_controls({"no_commit": 0})


def test_graphs_fail_on_a_machine_without_them(site: Site) -> None:
    """Steps are counted, texts are alike, and none of the graphs is there."""
    with pytest.raises(CheckFailed, match=r"oracle: .* expected most of them PIECEWISE") as caught:
        graphs.piecewise_graphs(site)
    steps = caught.value.found["oracle"]
    assert set(steps) == {"NONE"}
    assert steps["NONE"] > 10
    with pytest.raises(CheckFailed, match="steps with trees in PIECEWISE graphs") as caught:
        graphs.full_graphs_v1(site)
    assert caught.value.found["trees"]["NONE with tree"] > 5


def test_a_tree_in_a_full_graph_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = graphs.Modes({("FULL", True): 1, ("PIECEWISE", True): 9})
    monkeypatch.setattr(graphs, "run_counted", lambda *_, **__: modes)
    with pytest.raises(CheckFailed, match="a tree got a FULL graph"):
        graphs.trees_get_no_full_graph(site, [])
    del modes["FULL", True]
    assert graphs.trees_get_no_full_graph(site, []) == {"trees": {"PIECEWISE with tree": 9}}


def test_relaxed_rule(site: Site) -> None:
    found = relaxed.relaxed_rule(site)
    assert all(0 < tolerated < 12 for tolerated in found["tolerated"].values()), found
    assert found["answers_changed"] > 0


def test_relaxed_rule_fails_where_the_device_decides_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: list[Any] = []
    decide = relaxed.RelaxedRule.of_step

    def of_step(self: Any, *args: Any) -> Any:
        places.append(None)
        rule = decide(self, *args)
        return rule if len(places) == 1 else lambda logits: rule(-logits)

    monkeypatch.setattr(relaxed.RelaxedRule, "of_step", of_step)
    with pytest.raises(CheckFailed, match="rule top_k on cpu"):
        relaxed.rule_on(relaxed.RULES[0], "cpu")


def test_bench_alone(site: Site) -> None:
    found = alone.bench_alone(site)
    assert found["runs"] == 4
    assert not found["failures"]


def test_bench_alone_fails_where_an_engine_does(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(part: Any, *_: object) -> Any:
        raise EngineFailed(f"{part.name}: out of memory")

    monkeypatch.setattr(alone, "measure_part", fail)
    with pytest.raises(CheckFailed, match="plain: out of memory"):
        alone.bench_alone(site)


def test_engines_of_the_checks_are_those_of_this_process(site: Site) -> None:
    assert runner_of(site.engine(backend="TRITON_ATTN")) is runner_of(site.engine())


def test_passes_of_draft_models(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    found = draft_passes.draft_graphs(site)
    for name in ("chain", "head", "blocks"):
        assert found[name]["with"]["passes"] > 10
        assert found[name]["with"]["pass_us"] > 0
    assert found["chain"]["with"]["accepted"] > 50
    monkeypatch.setattr(draft_passes, "LEAST_OF_ITSELF", 1.1)
    with pytest.raises(CheckFailed, match="draft tokens were accepted of a model that drafts for"):
        draft_passes.draft_graphs(site)
