# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of draft models' passes, which engines have unless a variable says no."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from generation import run, tokens
from save_dflash import ALL_EXTRAS, save_dflash
from save_eagle3 import save_eagle3
from scenarios import SCENARIOS
from test_greedy_identity import runner_of

from gpu_check.identity import BACKEND
from gpu_check.site import Site, require, require_identical
from vllm_spec_ext.engine.models.draft_graphs import REFUSED_BY

NAME = "mixed_lengths"
LEAST_OF_ITSELF = 0.8  # of a target's own drafts; in float32 it accepts nearly all


def draft_graphs(site: Site) -> dict[str, Any]:
    """Passes with and without graphs: tokens of plain decoding, and as many drafts accepted."""
    expected = tokens(run(site.engine(backend=BACKEND), SCENARIOS[NAME]))
    found: dict[str, Any] = {}
    for name, config in _methods(site).items():
        found[name] = {}
        for kind, asked in (("without", "0"), ("with", "1")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(REFUSED_BY, asked)
                # Else an engine with the same arguments would be the same one on a CPU.
                engine = site.with_graphs(
                    "FULL_AND_PIECEWISE",
                    speculative_config={**config, "adaptive_length": False},
                    backend=BACKEND,
                    max_num_batched_tokens=96 + int(asked),
                )
            passes = found[name][kind] = _answered(engine, f"{name} {kind} graphs", expected)
            require(
                passes["recorded"] == (asked == "1" and site.on_gpu),
                f"{name} {kind} graphs: the engine's passes say the contrary",
                **found,
            )
        accepted = [found[name][kind]["accepted"] for kind in ("without", "with")]
        require(
            abs(accepted[1] - accepted[0]) <= 0.05 * max(accepted),
            f"{name}: {accepted[1]} draft tokens were accepted with graphs, {accepted[0]} without; "
            "expected as many",
            **found,
        )
    chain = found["chain"]["with"]
    require(
        chain["accepted"] > LEAST_OF_ITSELF * chain["drafted"],
        f"chain: {chain['accepted']} of {chain['drafted']} draft tokens were accepted of a model "
        "that drafts for itself, expected nearly all",
        **found,
    )
    return found


def _methods(site: Site) -> dict[str, dict[str, Any]]:
    target = site.folder / "tiny"
    folder = Path(tempfile.mkdtemp(dir=site.folder))
    return {
        "chain": {"method": "small_model", "model": str(target), "num_speculative_tokens": 4},
        "head": {
            "method": "small_model",
            "model": save_eagle3(target, folder / "head"),
            "num_speculative_tokens": 4,
        },
        "blocks": {
            "method": "nar",
            "model": save_dflash(target, folder / "blocks", seed=6, nar=ALL_EXTRAS),
            "num_speculative_tokens": 6,
        },
    }


def _answered(engine: Any, what: str, expected: Any) -> dict[str, Any]:
    """What became of drafts, and how long a pass took; raises CheckFailed."""
    drafter = runner_of(engine).drafter
    outcomes: list[Any] = []
    observe = drafter._proposer.observe

    def watch(told: Any) -> None:
        outcomes.extend(told)
        observe(told)

    (model,) = drafter.models._all
    run(engine, SCENARIOS[NAME])  # what is compiled at first takes time
    before = (model.counts.forwards, model.counts.seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter._proposer, "observe", watch)
        answers = tokens(run(engine, SCENARIOS[NAME]))
    for one, true in zip(answers, expected, strict=True):
        require_identical(what, true, one)
    passes = model.counts.forwards - before[0]
    return {
        "drafted": sum(outcome.num_drafted for outcome in outcomes),
        "accepted": sum(outcome.num_accepted for outcome in outcomes),
        "passes": passes,
        "pass_us": round(1e6 * (model.counts.seconds - before[1]) / max(passes, 1)),
        "recorded": drafter.models.paged[0]._graphs is not None,
    }
