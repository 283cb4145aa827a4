# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: which steps get which, and that no token changes.

vLLM chooses a graph for every step (0.32 ``CudagraphDispatcher.dispatch``, of V2
``CudaGraphManager.dispatch``); what it chose is counted here, beside whether the step had a tree.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from generation import run
from scenarios import PROMPTS, Scenario
from test_greedy_identity import METHODS, runner_of

from gpu_check import builders
from gpu_check.identity import BACKEND, firsts
from gpu_check.site import Site, require, require_identical

SCENARIO = Scenario([{"max_tokens": 40, "ignore_eos": True}], PROMPTS)
Modes = Counter[tuple[str, bool]]
"""(graph mode, whether the step had a tree) -> steps."""


def piecewise_graphs(site: Site) -> dict[str, Any]:
    """Chains and trees under PIECEWISE graphs."""
    answers = firsts(run(site.engine(backend=BACKEND), SCENARIO))
    found: dict[str, Any] = {}
    for method in ("oracle", "oracle_tree"):
        modes = run_counted(site, "PIECEWISE", method, answers)
        found[method] = shown(modes)
        require(
            with_mode(modes, "PIECEWISE") > 0.5 * modes.total(),
            f"{method}: {found[method]} steps by graph, expected most of them PIECEWISE",
            **found,
        )
    return found


def full_graphs(site: Site) -> dict[str, Any]:
    """FULL graphs for all but trees, on V2."""
    answers = firsts(run(site.engine(backend=BACKEND), SCENARIO))
    found = trees_get_no_full_graph(site, answers)
    # Asynchronous: every request verifies as many tokens, which is what vLLM's FULL graphs are made
    # for; else drafts of all lengths take ours.
    chosen = (("plain", None, False), ("chains", "oracle", False), ("async_chains", "oracle", True))
    for name, method, is_async in chosen:
        modes = run_counted(site, "FULL_AND_PIECEWISE", method, answers, is_async=is_async)
        found[name] = shown(modes)
        require(
            with_mode(modes, "FULL") > 0,
            f"{name}: {found[name]} steps by graph, expected some of them FULL",
            **found,
        )
    return found


def full_graphs_v1(site: Site) -> dict[str, Any]:
    """The V1 runner, where chains are scheduled step by step."""
    answers = firsts(run(site.engine(backend=BACKEND), SCENARIO))
    found = trees_get_no_full_graph(site, answers)
    modes = run_counted(site, "FULL_AND_PIECEWISE", None, answers)
    found["plain"] = shown(modes)
    require(
        with_mode(modes, "FULL") > 0,
        f"plain: {found['plain']} steps by graph, expected some of them FULL",
        **found,
    )
    return found


def flash_attention_graphs(site: Site) -> dict[str, Any]:
    """Drafts of all lengths, and of one, under the graphs that an engine with FlashAttention has.

    In bfloat16, so by log-probabilities, see :func:`gpu_check.builders.flash_attention`.
    """
    sizes: dict[str, Any] = {"backend": "FLASH_ATTN", "dtype": "bfloat16"}
    reference = run(site.engine(**sizes), builders.SCENARIO)
    found: dict[str, Any] = {}
    for name, is_async in (("chains", False), ("async_chains", True)):
        engine = site.with_graphs(
            "FULL_AND_PIECEWISE",
            speculative_config=METHODS["oracle"],
            async_scheduling=is_async,
            **sizes,
        )
        outputs, modes = answer_counted(engine, builders.SCENARIO, firsts(reference))
        found[name] = builders.require_agreement(name, reference, outputs, **shown(modes))
        require(
            not site.on_gpu or with_mode(modes, "FULL") > 0,
            f"{name}: {found[name]} steps by graph, expected some of them FULL",
            **found,
        )
    return found


def trees_get_no_full_graph(site: Site, answers: list[list[int]]) -> dict[str, Any]:
    """A FULL graph has a fixed number of requests; raises CheckFailed if a tree got one."""
    modes = run_counted(site, "FULL_AND_PIECEWISE", "oracle_tree", answers)
    found: dict[str, Any] = {"trees": shown(modes)}
    require(modes["FULL", True] == 0, f"trees: {found['trees']}: a tree got a FULL graph", **found)
    require(
        modes["PIECEWISE", True] > 5,
        f"trees: {found['trees']}, expected more than 5 steps with trees in PIECEWISE graphs",
        **found,
    )
    return found


def run_counted(
    site: Site, mode: str, method: str | None, answers: list[list[int]], *, is_async: bool = False
) -> Modes:
    """Answer under graphs of a mode, compare, and count; raises CheckFailed.

    Args:
        site: Where.
        mode: vLLM's ``cudagraph_mode``.
        method: One of the tests' methods; None drafts nothing.
        answers: Of plain decoding without graphs.
        is_async: Asynchronous scheduling.
    """
    arguments: dict[str, Any] = {"backend": BACKEND, "async_scheduling": is_async}
    if method is not None:
        arguments["speculative_config"] = METHODS[method]
    engine = site.with_graphs(mode, **arguments)
    outputs, modes = answer_counted(engine, SCENARIO, None if method is None else answers)
    require_identical(f"{method or 'plain'} with {mode} graphs", answers, firsts(outputs))
    return modes


def answer_counted(
    engine: Any, scenario: Scenario, truths: list[list[int]] | None
) -> tuple[Any, Modes]:
    """Outputs, and what graphs the steps had.

    Args:
        engine: Any.
        scenario: What to answer.
        truths: What an oracle knows.
    """
    modes: Modes = Counter()
    with counted(runner_of(engine), modes):
        outputs = run(engine, scenario, truths)
    return outputs, modes


@contextmanager
def counted(runner: Any, modes: Modes) -> Iterator[None]:
    """Count what vLLM chooses for the steps of a runner."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    def count(mode: Any) -> None:
        trees = getattr(runner, "tree_attention", None)
        modes[mode.name, trees is not None and trees.plan is not None] += 1

    v1, v2 = CudagraphDispatcher.dispatch, CudaGraphManager.dispatch

    def dispatch_v1(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = v1(self, *args, **kwargs)
        count(chosen[0])
        return chosen

    def dispatch_v2(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = v2(self, *args, **kwargs)
        count(chosen.cg_mode)
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudagraphDispatcher, "dispatch", dispatch_v1)
        patch.setattr(CudaGraphManager, "dispatch", dispatch_v2)
        yield


def with_mode(modes: Modes, mode: str) -> int:
    """Steps of a mode, with trees and without."""
    return modes[mode, False] + modes[mode, True]


def shown(modes: Modes) -> dict[str, int]:
    """Ready for JSON."""
    return {f"{mode}{' with tree' if tree else ''}": n for (mode, tree), n in modes.items()}
