# SPDX-License-Identifier: Apache-2.0
"""A proposer's end of life, and what each process of a deployment may write."""

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from vllm_spec_ext.engine.drafting import drafter as drafter_module
from vllm_spec_ext.engine.drafting.drafter import Drafter
from vllm_spec_ext.engine.starting.spec_config import MethodSettings, SpecExtConfig
from vllm_spec_ext.environment import READ_ONLY
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    UNSALTED,
    BaseProposer,
    Draft,
    EngineHandle,
    RequestStep,
    StepContext,
    proposer,
)

LIVES: list[str] = []
"""What the proposers of this file lived through."""


@proposer("mortal", summary="Test proposer that tells of its end.", num_speculative_tokens=4)
class Mortal(BaseProposer):
    """Drafts nothing."""

    def start(self, engine: EngineHandle) -> None:
        self.may_write = engine.may_write_files
        self.may_write_own = engine.may_write_own_files
        LIVES.append("start")

    def propose(self, step: StepContext) -> list[Draft]:
        return [EMPTY_DRAFT] * len(step.requests)

    def close(self) -> None:
        LIVES.append("close")


@proposer("failing", summary="Test proposer that cannot end.", num_speculative_tokens=4)
class Failing(Mortal):
    """Its disk is full."""

    def close(self) -> None:
        raise OSError("no space left on device")


class Endless:
    """A third party's, with the required methods alone."""

    info = replace(Mortal.info, name="endless")
    needs = BaseProposer.needs

    def __init__(self, options: MethodOptions) -> None:
        pass

    def start(self, engine: EngineHandle) -> None:
        LIVES.append("start")


class Target(torch.nn.Module):
    """A model of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


class Tokenizer:
    """Just a vocabulary."""

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(50)}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [len(word) for word in text.split()]


@pytest.fixture(autouse=True)
def _register(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mortal", "failing", "endless"):
        monkeypatch.setitem(registry.BUILTIN, name, f"{__name__}:{name.title()}")
    monkeypatch.setattr(drafter_module, "load_tokenizer", lambda model: Tokenizer())
    LIVES.clear()


def make(method: str, *, index: int = 0, rank: int = 0, **options: Any) -> Drafter:
    """A drafter as a worker builds it, its model loaded."""
    schema = registry.load(method).info.options
    spec = object.__new__(SpecExtConfig)
    object.__setattr__(spec, "num_speculative_tokens", 4)
    object.__setattr__(
        spec,
        "spec_ext",
        MethodSettings(
            method=method,
            options=schema.model_validate(options),
        ),
    )
    config = SimpleNamespace(
        speculative_config=spec,
        scheduler_config=SimpleNamespace(max_num_seqs=4, async_scheduling=False),
        parallel_config=SimpleNamespace(rank=rank, data_parallel_index=index),
        model_config=SimpleNamespace(get_vocab_size=lambda: 50, max_model_len=64, model="MODEL"),
    )
    drafter = Drafter(config)
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    with patch.object(drafter_module, "get_tp_group", lambda: alone):
        drafter.load_model(Target())
    return drafter


def test_each_proposer_is_closed_once() -> None:
    drafter = make("mortal")
    drafter.reset()
    assert LIVES == ["start", "close", "start"]
    drafter.close()
    drafter.close()
    assert LIVES == ["start", "close", "start", "close"]


def test_a_drafter_that_goes_closes_its_proposer() -> None:
    make("mortal")
    gc.collect()
    assert LIVES == ["start", "close"]


def test_proposers_without_an_end_and_with_a_bad_one(caplog: pytest.LogCaptureFixture) -> None:
    drafter = make("endless")
    drafter.reset()
    drafter.close()
    assert LIVES == ["start", "start"]
    failing = make("failing")
    failing.reset()
    assert "could not be closed" in caplog.text
    assert LIVES == ["start", "start", "start", "start"]


def teach(drafter: Drafter, *tokens: int) -> list[int]:
    ids = np.array(tokens, np.int32)
    step = RequestStep("r", ids, 1, [int(ids[-1])], 1, share_group=UNSALTED)
    (draft,) = drafter.draft(StepContext([step]), [])
    drafter.finish(["r"])
    return draft.tokens.tolist()


AFTER_A_RESET = """
import sys
sys.path.insert(0, sys.argv[1])
import pytest
import test_drafter_lifetime as here

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(here.drafter_module, "load_tokenizer", lambda model: here.Tokenizer())
    drafter = here.make("adaptive_ngram", overlay="shared", overlay_file=sys.argv[2])
    here.teach(drafter, 1, 2, 3)
    drafter.reset()
    here.teach(drafter, 7, 8, 9)
"""


def test_at_exit_the_file_holds_what_the_latest_proposer_knows(tmp_path: Path) -> None:
    path = tmp_path / "overlay.safetensors"
    subprocess.run(
        [sys.executable, "-c", AFTER_A_RESET, str(Path(__file__).parent), str(path)],
        check=True,
        timeout=800,
    )
    drafter = make("adaptive_ngram", overlay="shared", overlay_file=str(path))
    assert teach(drafter, 7, 8) == [9]


@pytest.mark.parametrize(
    ("index", "rank", "may", "may_own"),
    [(0, 0, True, True), (1, 0, False, True), (0, 1, False, False), (3, 1, False, False)],
)
def test_one_process_of_a_deployment_may_write_files(
    *, index: int, rank: int, may: bool, may_own: bool
) -> None:
    proposer: Any = make("mortal", index=index, rank=rank)._proposer
    assert (proposer.may_write, proposer.may_write_own) == (may, may_own)


def test_a_benchmarks_engine_writes_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READ_ONLY, "1")
    proposer: Any = make("mortal")._proposer
    assert not proposer.may_write
    assert not proposer.may_write_own
