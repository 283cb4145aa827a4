# SPDX-License-Identifier: Apache-2.0
"""`nar` on a real engine: same text, drafts by definition, and those of vLLM's own dflash."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import run, tokens
from nar_reference import DenseDrafter
from save_dflash import ALL_EXTRAS, save_dflash
from scenarios import SCENARIOS
from test_greedy_identity import runner_of

from vllm_spec_ext.proposers.models import SlotCandidates, SlotHint
from vllm_spec_ext.proposers.nar.layout import NarConfig

KINDS: dict[str, dict[str, Any]] = {
    "public": {},
    "same_norms": {"seed": 8, "k_norms": False},
    "mask": {
        "seed": 4,
        "k_norms": False,
        "own_mask_embedding": True,
        "target_layer_ids": (0, 2),
    },
    "wide": {"seed": 5, "num_attention_heads": 8, "num_hidden_layers": 1, "intermediate_size": 96},
    "extras": {"seed": 6, "nar": ALL_EXTRAS, "own_mask_embedding": True},
    "selector": {"seed": 7, "nar": NarConfig(selector_rank=8)},
}

METHODS: dict[str, dict[str, Any]] = {
    "chain": {"model": "public", "num_speculative_tokens": 4},
    "tree": {"model": "public", "tree": True, "num_speculative_tokens": 10},
    "all_chain": {"model": "extras", "num_speculative_tokens": 6},
    "all_tree": {"model": "extras", "tree": True, "num_speculative_tokens": 12, "candidates": 8},
}

Record = tuple[tuple[int, ...], SlotHint | None, int, SlotCandidates | None]


@pytest.fixture(scope="module")
def drafters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("dflash")
    return {name: save_dflash(tiny_model, folder / name, **kind) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def expected(plain: Any) -> dict[str, Any]:
    return {name: tokens(run(plain, SCENARIOS[name])) for name in SCENARIOS}


@pytest.fixture(scope="module")
def engines(make_engine: Any, drafters: dict[str, str]) -> Callable[..., Any]:
    def make(name: str, **changes: Any) -> Any:
        config = {"method": "nar", "adaptive_length": False, **METHODS[name]}
        more = changes.pop("engine", {})
        config |= {"model": drafters[config["model"]], **changes}
        return make_engine(speculative_config=config, **more)

    return make


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """All that block drafters predict."""
    from vllm_spec_ext.engine.models.block_model import BlockModel

    found: list[Record] = []
    predict = BlockModel.predict

    def watched(self: Any, requests: Any, rows: Any, num_slots: int, *rest: Any) -> Any:
        made = predict(self, requests, rows, num_slots, *rest)
        hints = rest[1] or [None] * len(rows)
        for row, hint, one in zip(rows, hints, made, strict=True):
            text = tuple(requests[row].token_ids.tolist())
            left = min(num_slots, self.facts.num_slots, self.max_model_len - len(text))
            found.append((text, hint, left, one))
        return made

    monkeypatch.setattr(BlockModel, "predict", watched)
    return found


def greatest_difference(dense: DenseDrafter, records: list[Record], step: int = 5) -> float:
    """Between the candidates' log-probabilities and those of a dense computation."""
    worst = 0.0
    for text, hint, num_slots, found in records[::step]:
        if found is None:
            assert len(text) == 160  # no position is left
            continue
        alone = dense.log_probs(text, num_slots, hint)
        own = torch.from_numpy(found.tokens).long()
        size = own.shape[1]
        alone = alone[: len(own)]
        best = alone.topk(size).values
        worst = max(worst, float((alone.gather(1, own) - best).abs().max()))
        if num_slots == len(own):  # else the dense one would have a shorter block
            given = torch.from_numpy(found.log_probs)
            differ = (dense.conditional(text, own, hint) - given).abs().max()
            worst = max(worst, float(differ))
    return worst


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", METHODS)
def test_same_tokens(name: str, scenario: str, engines: Any, expected: dict[str, Any]) -> None:
    assert tokens(run(engines(name), SCENARIOS[scenario])) == expected[scenario]


@pytest.mark.parametrize("name", METHODS)
def test_drafts_by_definition(
    name: str,
    engines: Any,
    drafters: dict[str, str],
    tiny_model: Path,
    records: list[Record],
) -> None:
    """In mixed batches, beside chunked prefill, after prefix hits, near the greatest length."""
    engine = engines(name)
    for scenario in ("mixed_lengths", "prefix_reused", "max_model_len"):
        outputs = run(engine, SCENARIOS[scenario])
        if scenario == "prefix_reused":
            assert sum(out.num_cached_tokens for out in outputs) > 100
    dense = DenseDrafter(tiny_model, Path(drafters[METHODS[name]["model"]]))
    assert len(records) > 300
    assert greatest_difference(dense, records) < 1e-4


@pytest.fixture
def vllms(make_engine: Any, drafters: dict[str, str], expected: dict[str, Any]) -> Any:
    """Drafts of vLLM's own method ``dflash``, by the text before them."""

    def drafts(kind: str) -> dict[tuple[int, ...], list[int]]:
        config = {"method": "dflash", "model": drafters[kind], "num_speculative_tokens": 4}
        engine = make_engine(speculative_config=config, async_scheduling=False)
        runner, found = runner_of(engine), {}
        propose = runner.propose_draft_token_ids

        def record(output: Any, sampled: Any, *rest: Any) -> Any:
            made = propose(output, sampled, *rest)
            for row, new in enumerate(sampled.tolist()):
                length = int(runner.input_batch.num_tokens_no_spec[row])
                text = runner.input_batch.token_ids_cpu[row, :length].tolist()
                text += [token for token in new if token >= 0]  # not noted there yet
                found[tuple(text)] = made[row].tolist()
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "propose_draft_token_ids", record)
            for name in ("mixed_lengths", "prefix_reused"):
                assert tokens(run(engine, SCENARIOS[name])) == expected[name]
        return found

    return drafts


@pytest.mark.parametrize("kind", ["same_norms", "mask", "wide"])
def test_same_drafts_as_vllm(
    kind: str, vllms: Any, engines: Any, drafters: dict[str, str], records: list[Record]
) -> None:
    """Token by token, in mixed batches, beside chunked prefill, after prefix hits.

    On CPUs vLLM 0.32 gives the context's keys of all layers the norm of the first one, so layers
    here have the same one, or there is one layer.
    """
    theirs = vllms(kind)
    engine = engines("chain", model=drafters[kind])
    for name in ("mixed_lengths", "prefix_reused"):
        run(engine, SCENARIOS[name])
    pairs = [
        (found.tokens[:, 0].tolist(), theirs[text])
        for text, _, _, found in records
        if found is not None and text in theirs
    ]
    assert len(pairs) > 200
    differ = [pair for pair in pairs if pair[0] != pair[1][: len(pair[0])]]
    assert not differ, (len(differ), len(pairs), differ)
    assert len({token for ours, _ in pairs for token in ours}) > 20  # no constant


def test_extras_do_not_keep_vllm_from_running_a_checkpoint(vllms: Any) -> None:
    assert len(vllms("extras")) > 200
