# SPDX-License-Identifier: Apache-2.0
"""What a user gets who asks for a method and for nothing else.

On a GPU that is: memory measured by vLLM, the graphs' own on a KV cache that is dropped again;
drafts looked up on the device; a scheduler that lets them rest; and a full graph for each step,
with drafts and without. The other checks give the size of the cache, and most of them always draft.
"""

from collections import Counter
from typing import Any

import pytest
from generation import run
from scenarios import PROMPTS, Scenario
from test_greedy_identity import runner_of

from gpu_check.identity import BACKEND, firsts
from gpu_check.site import Site, require, require_identical
from vllm_spec_ext.engine.starting.scheduling import WIDTH_SCHEDULER

NUM_DRAFT_TOKENS = 8
TEXTS = Scenario(
    [{"max_tokens": 60, "ignore_eos": True, "allowed_token_ids": [40, 42, 44]}], PROMPTS
)
PARTS = 4
"""Times that the texts are asked for, so that steps with drafts and steps without are compared."""


def gpu_default(site: Site) -> dict[str, Any]:
    """No token changes, and each step has the graph that it should have."""
    plain = site.engine(backend=BACKEND)
    expected = firsts(run(plain, TEXTS))
    engine = _by_default(site)
    runner = runner_of(engine)
    found: dict[str, Any] = {"design": _design(engine, site)}
    blocks = runner.kv_cache_config.num_blocks
    given = runner_of(plain).kv_cache_config.num_blocks
    require(
        not site.on_gpu or blocks > given,
        f"{blocks} KV blocks in the memory that vLLM measured, expected more than the {given} of a "
        "small cache",
        **found,
    )
    steps, compared = Counter[tuple[str, int | None]](), 0
    with pytest.MonkeyPatch.context() as patch:
        _count(runner, steps, patch)
        for _ in range(PARTS):
            compared += require_identical("by default", expected, firsts(run(engine, TEXTS)))
    found |= {"compared": compared, "steps": shown(steps)}
    for length, what in ((1, "without drafts"), (1 + NUM_DRAFT_TOKENS, "with drafts")):
        number = sum(n for (_, uniform), n in steps.items() if uniform == length)
        require(number > 3, f"{number} steps {what}, expected more than 3", **found)
        require(
            not site.on_gpu or steps["FULL", length] == number,
            f"steps {what}: {found['steps']}, expected all of them FULL",
            **found,
        )
    return found


def _by_default(site: Site) -> Any:
    method = {"method": "input_copy", "num_speculative_tokens": NUM_DRAFT_TOKENS}
    if not site.on_gpu:  # where all of it is asked for
        widths = [(1, 1, 0), (2, 8, NUM_DRAFT_TOKENS)]
        return site.engine(
            speculative_config={**method, "num_speculative_tokens_per_batch_size": widths},
            async_scheduling=True,
            scheduler_cls=WIDTH_SCHEDULER,
        )
    return site.engine(
        speculative_config=method,
        backend=BACKEND,
        enforce_eager=False,
        kv_cache_memory_bytes=None,  # vLLM measures
    )


def _design(engine: Any, site: Site) -> dict[str, str]:
    """Names of what drafts, schedules and chooses graphs."""
    runner = runner_of(engine)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    found = {
        "scheduler": type(scheduler).__name__,
        "drafts": "on the host" if runner.late_steps is None else "on the device",
        "graphs": type(runner.cudagraph_manager).__name__,
    }
    expected = {"scheduler": "WidthScheduler", "drafts": "on the device"}
    if site.on_gpu:
        expected["graphs"] = "NearbyGraphs"
    wrong = {name: found[name] for name in expected if found[name] != expected[name]}
    require(not wrong, f"found {wrong}, expected {expected}", design=found)
    return found


def _count(runner: Any, steps: Counter[tuple[str, int | None]], patch: pytest.MonkeyPatch) -> None:
    """By graph, and by the tokens of each request where all have as many and none is a prompt."""
    manager = type(runner.cudagraph_manager)
    dispatch = manager.dispatch

    def counted(
        self: Any, num_reqs: int, num_tokens: int, uniform: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        chosen = dispatch(self, num_reqs, num_tokens, uniform, *args, **kwargs)
        steps[chosen.cg_mode.name, uniform] += 1
        return chosen

    patch.setattr(manager, "dispatch", counted)


def shown(steps: Counter[tuple[str, int | None]]) -> dict[str, int]:
    """Ready for JSON."""
    return {f"{mode}, {uniform or 'mixed'}": number for (mode, uniform), number in steps.items()}
