# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks give the tokens of one: rank 0 drafts, the other follows."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import run, tokens
from safetensors.torch import load, save
from save_dflash import HEADS, random_drafter
from save_drafts import save_draft
from save_eagle3 import save_eagle3
from scenarios import REPETITIVE, SCENARIOS
from test_blockwise_engine import save_random_heads
from tiny_engine import ARGUMENTS

from vllm_spec_ext.online.folder import ENGINE_LOCK, EngineState, write_record
from vllm_spec_ext.online.versions import drafter_hash, write_version
from vllm_spec_ext.proposers.blockwise.heads import CONFIG_NAME, WEIGHTS_NAME
from vllm_spec_ext.proposers.nar.layout import EXTRAS_NAME, NarConfig

ADAPTIVE = {"adaptive_length": True}
METHODS: dict[str, dict[str, Any]] = {
    "chain": {"method": "input_copy", "num_speculative_tokens": 8},
    "tree": {"method": "adaptive_ngram", "num_speculative_tokens": 12, "min_confidence": 0.0},
    "auto": {"method": "auto", "num_speculative_tokens": 12},
    "heads": {"method": "blockwise", "num_speculative_tokens": 3},
    "learning_heads": {"method": "blockwise", "num_speculative_tokens": 3},
    "learning_model": {"method": "small_model", "num_speculative_tokens": 3},
    "drawn_heads": {"method": "blockwise", "num_speculative_tokens": 3, "draw": True},
    "block": {"method": "nar", "num_speculative_tokens": 12, "tree": True},
    "learning_block": {"method": "nar", "num_speculative_tokens": 12, "tree": True},
    "adaptive_chain": {"method": "input_copy", "num_speculative_tokens": 8, **ADAPTIVE},
    "adaptive_block": {"method": "nar", "num_speculative_tokens": 12, "tree": True, **ADAPTIVE},
    "adaptive_auto": {"method": "auto", "num_speculative_tokens": 12, **ADAPTIVE},
    "cascade": {
        "method": "cascade",
        "levels": [{"method": "input_copy"}, {"model": "other"}, {"model": "self", "reviews": 3}],
        "num_speculative_tokens": 6,
    },
    "models": {"method": "model_paths", "num_speculative_tokens": 10, "shape": "fork"},
    "heads_and_models": {"method": "model_paths", "num_speculative_tokens": 10, "shape": "fork"},
    "view": {
        "method": "cache_view",
        "num_speculative_tokens": 4,
        "budget": 64,
        "sink": 0,
        "recent": 32,
        "draft_on_cpu": True,
    },
}
RESTING = {"adaptive_chain", "adaptive_block", "adaptive_auto"}  # they draft where it pays
# What a draft token adds to a step, in plain ones of one request: little, more than it can save,
# and little again for as long as it takes to try once more.
TOKEN_COSTS = {"adaptive_auto": (0.005, 0.5, *[0.005] * 5)}
NAMES = ("mixed_lengths", "seeded", "few_tokens")


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> dict[str, Any]:
    """What one rank generates without speculation."""
    engine = make_engine(max_num_batched_tokens=2048)
    scenarios = {**{name: SCENARIOS[name] for name in NAMES}, "repetitive": REPETITIVE}
    return {name: tokens(run(engine, scenario)) for name, scenario in scenarios.items()}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs an engine in processes of its own; arguments win over those of all tiny ones.

    See ``parallel_run.py``.
    """
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    folder = tmp_path_factory.mktemp("engines")
    log, numbers = folder / "log", itertools.count()
    with log.open("w") as errors:
        script = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "parallel_run.py")],
            env=os.environ | {"PYTHONPATH": paths_with_test_methods(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert script.stdin is not None
    assert script.stdout is not None
    stdin, stdout = script.stdin, script.stdout

    def run_engine(token_costs: Sequence[float] = (), **arguments: Any) -> dict[str, Any]:
        results = folder / f"{next(numbers)}.json"
        given = {**ARGUMENTS, "max_num_batched_tokens": 2048, **arguments}
        line = {"engine": given, "results": str(results), "token_costs": token_costs}
        stdin.write(json.dumps(line) + "\n")
        stdin.flush()
        while stdout.readline() not in ("done\n", ""):  # whatever libraries print
            continue
        assert results.is_file(), log.read_text()[-8000:]
        return json.loads(results.read_text())

    yield run_engine
    stdin.close()
    script.wait(60)


@pytest.fixture(scope="module", params=METHODS)
def found(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    engines: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What two ranks did with a method."""
    folder = tmp_path_factory.mktemp("parallel")
    config = {
        "adaptive_length": False,  # no clock decides what is drafted, but where a method says so
        **METHODS[request.param],
    }
    if config["method"] == "blockwise":
        vocab = [40, 42, 44]  # those of the scenario "few_tokens"
        config["model"] = str(save_random_heads(folder / "heads", vocab, copy_match=4))
    if request.param == "learning_heads":
        config["online"] = two_versions(folder, Path(config["model"]), "w_out")
    if request.param == "learning_model":
        config["model"] = str(tiny_model)
        config["online"] = two_versions(folder, tiny_model, "model.norm.weight")
    if config["method"] == "nar":
        heads = HEADS.model_copy(update={"copy_match": 4})
        extras = NarConfig(
            slot_queries=True, copy_match=4, heads=heads, selector_rank=8, draft_vocab_size=3
        )
        drafter = random_drafter(tiny_model, nar=extras)
        drafter.extras.draft_vocab = torch.tensor([40, 42, 44], dtype=torch.int32)
        drafter.save(folder / "drafter")
        config["model"] = str(folder / "drafter")
    if request.param == "learning_block":
        config["online"] = two_versions(folder, folder / "drafter", "norm.weight", EXTRAS_NAME)
    if config["method"] == "cascade":
        other = save_draft(tiny_model, folder / "other", num_hidden_layers=1, seed=9)
        names = {"other": other, "self": str(tiny_model)}
        config["levels"] = [
            {**level, "model": names[level["model"]]} if "model" in level else level
            for level in config["levels"]
        ]
    if config["method"] == "model_paths":
        if request.param == "models":
            other = save_draft(tiny_model, folder / "other", num_hidden_layers=1, seed=9)
        else:
            other = save_eagle3(tiny_model, folder / "other")
        config["models"] = [other, str(tiny_model)]
    return engines(
        model=str(tiny_model),
        speculative_config=config,
        # The ranks choose one themselves, and the scheduler has to follow.
        block_size=None if request.param == "models" else 32,
        token_costs=TOKEN_COSTS.get(request.param, ()),
    )


def two_versions(folder: Path, own: Path, turned: str, *more: str) -> dict[str, Any]:
    """Options under which a drafter and one with a weight of the other sign take turns.

    Args:
        folder: Of the test.
        own: The drafter.
        turned: The weight.
        *more: Files that it has beside those of all drafters.
    """
    files = {name: (own / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME, *more)}
    drafter = drafter_hash(files)
    weights = load(files[WEIGHTS_NAME])
    weights[turned] = -weights[turned]
    learned = folder / "learned"
    learned.mkdir()
    (learned / ENGINE_LOCK).touch()  # as an engine that has begun there
    write_version(learned, 0, files, drafter)
    write_version(learned, 1, {**files, WEIGHTS_NAME: save(weights)}, drafter)
    write_record(learned, EngineState(serving=1, handled=1))
    # By this seed the weights of the start have the first turn, the others the second.
    return {"folder": str(learned), "guard": 0.5, "others": 1.0, "budget": 0.0, "seed": 1}


def paths_with_test_methods(folder: Path) -> str:
    """Every process of an engine finds the test drafters like a third party's methods."""
    package = folder / "test_methods-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: test-methods\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[vllm_spec_ext.proposers]\nmodel_paths = model_drafters:ModelPaths\n"
    )
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)


def test_same_tokens_as_one_rank(found: dict[str, Any], plain: dict[str, Any]) -> None:
    for scenario in NAMES:
        assert found[scenario] == plain[scenario], scenario
    for name in ("repeated", "again"):  # the second after the proposer was built anew
        assert found[name] == plain["mixed_lengths"], name


@pytest.mark.parametrize("found", ["learning_heads", "learning_block"], indirect=True)
def test_versions_take_turns_on_both_ranks(found: dict[str, Any]) -> None:
    assert min(found["version_steps"]) > 20
    assert len(found["version_steps"]) == 2
    assert found["exchanges"] > 50


@pytest.mark.parametrize("found", ["learning_model"], indirect=True)
def test_a_worse_version_falls_on_both_ranks(found: dict[str, Any]) -> None:
    """Of a model, turns are long; a version that gets nothing accepted has no second one."""
    assert found["verdicts"] == ["fell behind version 0"]


@pytest.mark.parametrize("found", sorted(METHODS.keys() - RESTING), indirect=True)
def test_one_rank_drafts(found: dict[str, Any]) -> None:
    leader, follower = found["timed"]
    assert leader > 50
    assert follower == 0
    assert found["accepted"] > 10  # untrained heads copy, and little more


def test_both_ranks_take_the_same_drafts(found: dict[str, Any]) -> None:
    one, other = found["drafts"]
    assert one == other
    leader, follower = found["decided"]
    assert leader > 50
    assert follower == 0


@pytest.mark.parametrize("found", TOKEN_COSTS, indirect=True)
def test_the_budget_of_one_rank_ends_drafts_of_both_and_lets_them_come_back(
    found: dict[str, Any], plain: dict[str, Any]
) -> None:
    """No clock decides; the budget of the other rank, were it asked, would soon draft no more."""
    by_cost = []
    for at_cost in found["at_costs"]:
        assert at_cost["tokens"] == plain["repetitive"]
        one, other = at_cost["drafts"]
        assert one == other
        by_cost.append([sum(map(len, drafts)) for drafts in one])  # tokens, of each step
    assert sum(by_cost[0]) > 100
    assert any(by_cost[1])
    assert sum(map(bool, by_cost[1][len(by_cost[1]) // 2 :])) <= 2  # a try now and then
    assert sum(by_cost[-1]) > 100


@pytest.mark.parametrize("found", ["models", "heads_and_models"], indirect=True)
def test_both_ranks_keep_the_kv_of_models(found: dict[str, Any]) -> None:
    """The target is its own draft: where nothing else chooses, what is verified is accepted."""
    assert found["accepted"] > 150


def test_ranks_draw_alike(found: dict[str, Any]) -> None:
    """Without seeds, both ranks sample from global generators that must stay the same."""
    one, other = found["random"]
    assert one == other
