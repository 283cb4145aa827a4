# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs of draft models replay: as a CPU has none, passes are run again in their place.

Everything else is as on a GPU: every row is a request, inputs are copied into buffers that stay,
and rows that only fill a graph up leave no trace.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation import run, tokens
from save_dflash import ALL_EXTRAS, save_dflash
from save_drafts import save_draft
from save_eagle3 import save_eagle3
from scenarios import SCENARIOS
from test_greedy_identity import runner_of
from vllm.config.compilation import CUDAGraphMode

from vllm_spec_ext.engine.models import draft_graphs, host
from vllm_spec_ext.engine.models.draft_graphs import DraftGraphs, single_rows, wants_graphs
from vllm_spec_ext.engine.models.forward_pass import ForwardPass

NAMES = ("mixed_lengths", "seeded")
STEADY = {"adaptive_length": False}


class Repeats:
    """In the place of a recorder: a replay is the pass once more."""

    num_replays = 0

    def record(
        self, prepare: Callable[[], Any], run: Callable[[Any], Any]
    ) -> tuple[Any, Callable[[], None]]:
        output = run(prepare())

        def replay() -> None:
            Repeats.num_replays += 1
            again = run(prepare())
            one = isinstance(output, torch.Tensor)
            pairs = [(output, again)] if one else zip(output, again, strict=True)
            for kept, new in pairs:
                kept.copy_(new)

        return output, replay


@pytest.fixture(scope="module")
def methods(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("drafts")
    own, other = str(tiny_model), save_draft(tiny_model, folder / "other", num_hidden_layers=1)
    blocks = save_dflash(tiny_model, folder / "blocks", seed=6, nar=ALL_EXTRAS)
    head = save_eagle3(tiny_model, folder / "head")
    return {
        "chain": {"method": "small_model", "model": own, "num_speculative_tokens": 4},
        "tree": {
            "method": "token_tree",
            "models": [other, own],
            "expansion": [2, 1, 1],
            "num_speculative_tokens": 12,
        },
        "eagle": {"method": "small_model", "model": head, "num_speculative_tokens": 4},
        "blocks": {"method": "nar", "model": blocks, "tree": True, "num_speculative_tokens": 12},
    }


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "wants_graphs", lambda *arguments, **named: True)
    monkeypatch.setattr(host, "Recorder", Repeats)


def drafted(engine: Any) -> list[Any]:
    """What its proposer drafted in each step, and the answers, in all scenarios."""
    drafter = runner_of(engine).drafter
    found: list[Any] = []
    propose = drafter._proposer.propose
    with pytest.MonkeyPatch.context() as patch:

        def watched(step: Any) -> Any:
            made = propose(step)
            found.extend(draft.tokens.tolist() for draft in made)
            return made

        patch.setattr(drafter._proposer, "propose", watched)
        for name in NAMES:
            found.append(tokens(run(engine, SCENARIOS[name])))
    return found


def test_graphs_that_cannot_be_recorded_are_done_without(
    methods: dict[str, Any], make_engine: Any, with_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full card, for example; they save time, and that is all."""

    def fails(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    said: list[str] = []
    monkeypatch.setattr(Repeats, "record", fails)
    monkeypatch.setattr(host.logger, "warning", lambda text, *given: said.append(text % given))
    config = {**methods["blocks"], **STEADY}
    engine = make_engine(speculative_config=config, max_num_batched_tokens=96)
    (text,) = said
    assert "runs without CUDA graphs, which could not be recorded: OutOfMemoryError" in text
    assert len(drafted(engine)) > len(NAMES)


@pytest.mark.parametrize("name", ["chain", "tree", "eagle", "blocks"])
def test_drafts_are_those_of_passes_without(
    name: str, methods: dict[str, Any], make_engine: Any, with_graphs: None, plain: Any
) -> None:
    config = {**methods[name], **STEADY}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "wants_graphs", lambda *arguments, **named: False)
        without = drafted(make_engine(speculative_config=config))
    before = Repeats.num_replays
    # Other arguments, as equal ones would be the same engine.
    engine = make_engine(speculative_config=config, max_num_batched_tokens=97)
    assert drafted(engine) == without
    assert Repeats.num_replays > before + 20
    for scenario in NAMES:
        expected = tokens(run(plain, SCENARIOS[scenario]))
        assert tokens(run(engine, SCENARIOS[scenario])) == expected


@pytest.mark.parametrize("fault", ["filling rows write", "rows see too much"])
def test_a_fault_is_found_out(
    fault: str,
    methods: dict[str, Any],
    make_engine: Any,
    with_graphs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**methods["blocks"], **STEADY}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "wants_graphs", lambda *arguments, **named: False)
        without = drafted(make_engine(speculative_config=config))
    if fault == "filling rows write":
        monkeypatch.setattr(draft_graphs, "NO_SLOT", 40 * 32)  # a block that requests have
    else:
        rows = draft_graphs.single_rows
        monkeypatch.setattr(draft_graphs, "single_rows", lambda plan: shifted(rows(plan)))
    size = 98 if fault == "filling rows write" else 99
    assert drafted(make_engine(speculative_config=config, max_num_batched_tokens=size)) != without


def shifted(plan: ForwardPass) -> ForwardPass:
    plan.seq_lens[:] += 1
    return plan


def test_rows_of_a_part_see_what_is_before_them() -> None:
    plan = ForwardPass(
        ids=np.arange(6),
        positions=np.array([7, 8, 9, 3, 4, 0]),
        slots=np.arange(6),
        query_lens=np.array([3, 2, 1], np.int32),
        seq_lens=np.array([10, 5, 1], np.int32),
        tables=np.array([[1, 2], [3, 4], [5, 6]], np.int32),
        wanted=np.array([2, 4, 5]),
    )
    rows = single_rows(plan)
    assert rows.query_lens.tolist() == [1] * 6
    assert rows.seq_lens.tolist() == [8, 9, 10, 4, 5, 1]
    assert rows.tables[:, 0].tolist() == [1, 1, 1, 3, 3, 5]
    assert single_rows(rows) is rows


def test_who_gets_them(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = runner_of(make_engine()).vllm_config
    gpu = torch.device("cuda")
    assert not wants_graphs(config, gpu, weights_change=False)  # enforce_eager
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL)
    assert wants_graphs(config, gpu, weights_change=False)
    with monkeypatch.context() as patch:
        patch.setenv(draft_graphs.REFUSED_BY, "0")
        assert not wants_graphs(config, gpu, weights_change=False)
    assert not wants_graphs(config, gpu, weights_change=True)
    assert not wants_graphs(config, torch.device("cpu"), weights_change=False)
    monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", 2)
    assert not wants_graphs(config, gpu, weights_change=False)


def test_a_pass_of_a_prompt_has_none() -> None:
    graphs = DraftGraphs.__new__(DraftGraphs)
    graphs._tables = torch.zeros(256, 4)
    for lengths, fits in (([1] * 256, True), ([1] * 257, False), ([3, 16], True), ([17], False)):
        parts, num_rows = np.array(lengths, np.int32), np.arange(sum(lengths))
        tables = np.zeros((len(parts), 4), np.int32)
        plan = ForwardPass(num_rows, num_rows, num_rows, parts, parts, tables, num_rows)
        assert graphs.fits(plan) == fits
