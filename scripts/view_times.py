# SPDX-License-Identifier: Apache-2.0
"""What drafting over a view of the KV cache costs: time of each part, and memory.

    python scripts/view_times.py MODEL --lengths 4k 7k --batch-size 1 4

The target drafts in every step, whether it pays or not, behind prompts of made-up text, and clocks
hang on the parts of a round. Printed are, for each length and batch size: a plain step, a round
and its parts in milliseconds (mean of the rounds behind the first), and page means, which are made
once a page, by 1,000 tokens of prompt; then the memory that views take beside the KV cache.

- forward: the target's passes, less what follows
- selection: each layer's choice of pages by the query of the last token
- tables: block tables, slots and attention metadata of the passes
- books: what a round shows of which request
- tokens: the likeliest token of each row

A clock around a part shows the launching of its kernels alone where these run beside the host: on
a GPU set CUDA_LAUNCH_BLOCKING=1. What is measured while something else runs is worth nothing.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from statistics import mean
from typing import Any

from vllm_spec_ext.bench.long_context import LENGTHS, needle_questions
from vllm_spec_ext.bench.prompts import Question

PARTS = ("forward", "selection", "means", "tables", "books", "tokens")


class Clocks:
    """Seconds by part; a part that runs within another one is not counted twice."""

    def __init__(self) -> None:
        """All at zero."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_passes = self.num_pages = 0  # passes of this round, and pages that got means
        self.rounds: list[dict[str, float]] = []  # seconds by part, and these counts
        self._running: list[str] = []
        self._since = 0.0

    def hang(self, owner: Any, name: str, part: str) -> None:
        """Count what a function takes as a part."""
        timed: Callable[..., Any] = getattr(owner, name)

        @wraps(timed)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._switch(part)
            try:
                return timed(*args, **kwargs)
            finally:
                self._switch(None)

        setattr(owner, name, wrapper)

    def hang_round(self, owner: Any, name: str) -> None:
        """Count each call of a function as a round, if any pass ran in it."""
        timed: Callable[..., Any] = getattr(owner, name)

        @wraps(timed)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.seconds.clear()
            self.num_passes = self.num_pages = 0
            started = time.perf_counter()
            result = timed(*args, **kwargs)
            if self.num_passes:
                whole = time.perf_counter() - started
                counts = {"round": whole, "passes": self.num_passes, "pages": self.num_pages}
                self.rounds.append({**self.seconds, **counts})
            return result

        setattr(owner, name, wrapper)

    def _switch(self, part: str | None) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        if part is None:
            self._running.pop()
        else:
            self._running.append(part)
        self._since = now


def hang_clocks() -> Clocks:
    """On the parts of a round; vLLM is started before, as numba's modules come after it."""
    from vllm_spec_ext.engine.views import target_view
    from vllm_spec_ext.engine.views.layer_tables import LayerTables
    from vllm_spec_ext.engine.views.page_means import PageMeans
    from vllm_spec_ext.engine.views.paged_target import PagedTarget
    from vllm_spec_ext.proposers import cache_view

    clocks = Clocks()
    clocks.hang(LayerTables, "choose", "selection")
    clocks.hang(PageMeans, "update", "means")
    for name in ("begin", "begin_pass", "end_pass"):
        clocks.hang(LayerTables, name, "tables")
    clocks.hang(PagedTarget, "_metadata", "tables")
    clocks.hang(target_view, "lay_out_pass", "tables")
    clocks.hang(PagedTarget, "run_view", "forward")
    clocks.hang(target_view.HostedView, "begin", "books")
    clocks.hang(cache_view, "_go_on", "tokens")
    clocks.hang_round(cache_view.CacheView, "propose")
    update, run = PageMeans.update, PagedTarget.run_view

    def counted_update(means: PageMeans, blocks: Any) -> None:
        clocks.num_pages += len(blocks)
        update(means, blocks)

    def counted_run(paged: PagedTarget, index: int, plan: Any) -> Any:
        clocks.num_passes += 1
        return run(paged, index, plan)

    PageMeans.update = counted_update  # type: ignore[assignment,method-assign]
    PagedTarget.run_view = counted_run  # type: ignore[method-assign]
    return clocks


def parse() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=["4k", "7k"])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--view", choices=("retrieval", "stream"), default="retrieval")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--refresh", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=2 << 30)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


@dataclass(frozen=True)
class Costs:
    """Of one length and batch size, in milliseconds."""

    plain_step: float
    round: float  # all parts, and what no clock saw
    parts: dict[str, float]  # of a round behind the first
    passes: float  # in a round
    means_of_1000_tokens: float  # of page means, once in the life of a page


def measure(
    clocks: Clocks, engine: Any, prompts: Sequence[Question], block_size: int, num_tokens: int
) -> Costs:
    """Let some requests be answered at once: drafted for, then plainly."""
    from vllm import SamplingParams

    def answer(num: int, **options: Any) -> float:
        params = SamplingParams(
            temperature=0.0, max_tokens=num, ignore_eos=True, extra_args={"spec_ext": options}
        )
        started = time.perf_counter()
        engine.chat([list(one.opening) for one in prompts], params, use_tqdm=False)
        return time.perf_counter() - started

    engine.reset_prefix_cache()
    answer(1, enabled=False)  # reads the prompts
    first, all_ = answer(1, enabled=False), answer(num_tokens, enabled=False)
    clocks.rounds.clear()
    answer(num_tokens)
    of_prompts, *rounds = clocks.rounds
    if len(rounds) < 2:
        raise SystemExit(f"found {len(rounds)} rounds behind the first; give more --max-tokens")
    return Costs(
        plain_step=1e3 * (all_ - first) / (num_tokens - 1),
        round=1e3 * mean(one["round"] for one in rounds),
        parts={part: 1e3 * mean(one.get(part, 0.0) for one in rounds) for part in PARTS},
        passes=mean(one["passes"] for one in rounds),
        means_of_1000_tokens=1e6
        * of_prompts.get("means", 0.0)
        / max(1, of_prompts["pages"] * block_size),
    )


def show(name: str, batch_size: int, costs: Costs) -> None:
    """One line."""
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in costs.parts.items())
    print(
        f"{name} x {batch_size}: plain step {costs.plain_step:.1f} ms; round of {costs.passes:.1f} "
        f"passes {costs.round:.1f} ms: {parts}; means of 1,000 tokens "
        f"{costs.means_of_1000_tokens:.1f} ms"
    )


def main() -> None:
    """See the module's docstring."""
    given = parse()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the clocks hang in this process

    from vllm import LLM

    from vllm_spec_ext.engine.views.view_memory import ViewMemory

    engine = LLM(
        given.model,
        dtype=given.dtype,
        max_num_seqs=max(given.batch_size),
        block_size=given.block_size,
        enforce_eager=True,
        kv_cache_memory_bytes=given.kv_cache_memory_bytes,
        speculative_config={
            "method": "cache_view",
            "num_speculative_tokens": given.num_speculative_tokens,
            "view": given.view,
            "budget": given.budget,
            "refresh": given.refresh,
            "adaptive_length": False,
            "draft_on_cpu": True,
        },
    )
    clocks = hang_clocks()
    found = []
    for name in given.lengths:
        prompts = needle_questions(max(given.batch_size), lengths={name: LENGTHS[name]})
        for size in given.batch_size:
            costs = measure(clocks, engine, prompts[:size], given.block_size, given.max_tokens)
            show(name, size, costs)
            found.append({"length": name, "batch_size": size, **asdict(costs)})
    worker = engine.llm_engine.model_executor.driver_worker.worker
    memory = ViewMemory.of(worker.model_runner.drafter.views.paged)
    print(memory)
    if given.out:
        given.out.write_text(json.dumps({"times": found, "memory": asdict(memory)}, indent=1))


if __name__ == "__main__":
    main()
