# SPDX-License-Identifier: Apache-2.0
"""``scripts/nar_ablations.py``: its variants, its standard errors, and a whole small run."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from vllm_spec_ext.training.acceptance import tokens_per_step, walk, walk_texts
from vllm_spec_ext.training.batches import split_data
from vllm_spec_ext.training.nar.schema import NarTraining
from vllm_spec_ext.training.shards import read_data

SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "nar_ablations.py"


@pytest.fixture(scope="module")
def ablations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nar_ablations", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tokens_and_steps_of_each_text() -> None:
    starts = np.array([0, 5, 5, 8])
    accepted = [1, 0, 3, 0, 0, 0, 2, 0]
    counts = walk_texts(starts, lambda row: accepted[row])
    assert counts.tolist() == [[6, 2], [0, 0], [4, 2]]  # the last tokens of a draft may lie behind
    assert tokens_per_step(counts) == walk(starts, lambda row: accepted[row]) == 2.5
    assert np.isnan(tokens_per_step(counts[1:2]))


def test_variants_are_settings(ablations: ModuleType, settings: Callable[..., NarTraining]) -> None:
    for name, changes in ablations.VARIANTS.items():
        config = settings(slots=6, layers=1)
        changed = NarTraining.model_validate({**config.model_dump(), **changes})
        assert (changed == config) == (name == ablations.BASE), name


def test_differences_are_between_the_same_texts(ablations: ModuleType) -> None:
    """Texts differ much, variants by one token in ten of each: a small error of the difference."""
    random = np.random.default_rng(0)
    steps = random.integers(20, 60, 24)
    tokens = (steps * random.uniform(1.2, 3.5, 24)).astype(int)
    one = {"chain6": np.stack([tokens, steps], 1)}
    other = {"chain6": np.stack([tokens, np.round(steps * 0.9).astype(int)], 1)}
    alone = ablations.cell(one, None, "chain6")
    spread = float(alone.split(" ± ")[1])
    assert 0.05 < spread < 0.3
    difference = ablations.cell(other, one, "chain6").split("(")[1].rstrip(")")
    assert float(difference.split(" ± ")[0]) == pytest.approx(0.1 * tokens.sum() / steps.sum(), 0.2)
    assert float(difference.split(" ± ")[1]) < 0.3 * spread


def test_parts_of_the_figures_are_theirs(
    ablations: ModuleType,
    settings: Callable[..., NarTraining],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run on the toy language; what was measured is not measured again."""
    config = settings()
    monkeypatch.setattr(ablations, "record_answers", lambda *_: ["a"] * 30 + ["b"] * 30)
    measured = tmp_path / "runs" / "measured"
    measured.mkdir(parents=True)
    (measured / "data").symlink_to(config.data_folder)
    words = f"x {tmp_path / 'runs'} --model {config.model} --data {config.data_folder} --dataset a"
    shared = "--max-steps 60 --slots 4 --layers 1 --draft-vocab 48 --learning-rate 0.01"
    shared += " --cache-hidden --device cpu --batch-size 8 --selector-rank 8 --dropout 0"
    command = [*words.split(), "--only", "base,slots4,no_copies", "--", *shared.split()]
    monkeypatch.setattr(ablations.sys, "argv", command)
    ablations.main()
    out = capsys.readouterr().out
    assert "all: 60 texts" in out
    assert "b: 30 texts" in out
    rows = [line for line in out.splitlines() if line.startswith("| base, copies switched off")]
    assert len(rows) == 3
    found = json.loads((tmp_path / "runs" / "base.json").read_text())["as trained"]
    figures = json.loads((tmp_path / "runs" / "base.run" / "figures.json").read_text())
    chains = np.array(found["chain4"])
    assert tokens_per_step(chains) > 2.0
    data = read_data(config.data_folder)
    split = split_data(data, config.max_length, config.eval_sequences, config.seed)
    assert abs(tokens_per_step(chains[split.held_out]) - figures["chain_lengths"][3]) < 0.3
    before = (tmp_path / "runs" / "base.json").stat().st_mtime_ns
    ablations.main()
    assert (tmp_path / "runs" / "base.json").stat().st_mtime_ns == before
