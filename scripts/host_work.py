# SPDX-License-Identifier: Apache-2.0
"""How long our own work on the host takes in a step of vLLM's V2 runner, part by part.

    taskset -c 0 python scripts/host_work.py --batch-size 1,8,64 --json host_work.json

A tiny model runs on one core in Triton's interpreter, which takes far longer than a GPU would; what
is measured is the time in this plugin's functions, without that in vLLM's functions that they call.
What they launch on a GPU is part of it, and takes another time there. Every request verifies a
chain of 8 tokens, or a tree of 16 nodes in four branches, a part of which is right. Printed are
milliseconds a step: the median of steps in which every request verified one. On a CPU the copies of
KV blocks are shown, and are not part of ours: moving them is what a device does.

The processor is the one of this machine: on a busy one the figures mean nothing, unless
``--clock cpu`` counts this thread's time alone, in which all of it runs. ``--profile FILE`` also
writes what ``cProfile`` saw, which takes time itself.
"""

import argparse
import cProfile
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("prepare", "verify", "commit", "draft", "copies", "propose")
"""Of a step, in their order. ``copies`` are those of KV blocks, ``propose`` is the proposer itself,
here one that knows its answer."""

SHAPES = ("chain", "tree")
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
CHAIN_NODES, TREE_NODES, BRANCHES = 8, 16, 4
NEW_TOKENS = 60
THEIRS = "theirs"


@dataclass
class Stages:
    """Time by stage; what one stage takes inside another counts for the inner one alone."""

    clock: Callable[[], float] = time.perf_counter
    profile: cProfile.Profile | None = None  # watches our stages, and not vLLM's
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inner: list[float] = field(default_factory=lambda: [0.0])
    _is_profiled: bool = False

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its own time counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            outer = self._is_profiled
            self._watch(stage != THEIRS)
            started = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                taken = self.clock() - started
                self.seconds[stage] += taken - self._inner.pop()
                self._inner[-1] += taken
                self._watch(outer)

        return call

    def _watch(self, on: bool) -> None:
        if self.profile is not None and on != self._is_profiled:
            (self.profile.enable if on else self.profile.disable)()
        self._is_profiled = on

    def take(self) -> dict[str, float]:
        """Milliseconds of each of our stages since the last call."""
        found = {stage: 1e3 * self.seconds[stage] for stage in STAGES}
        self.seconds.clear()
        return found


def make_visible() -> None:
    """The V2 runner on a CPU, see ``tests/engine_v2/boot``; before Triton, torch and vLLM."""
    boot = str(ROOT / "tests" / "engine_v2" / "boot")
    sys.path[:0] = [boot, str(ROOT / "tests" / "engine")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [boot, os.environ.get("PYTHONPATH")]))
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def config_of(shape: str) -> dict[str, Any]:
    """``speculative_config`` of the drafter in ``tests/engine/drafters.py`` that knows answers."""
    nodes = CHAIN_NODES if shape == "chain" else TREE_NODES
    return {"method": "branches", "num_speculative_tokens": nodes, "branches": _branches(shape)}


def _branches(shape: str) -> int:
    return 1 if shape == "chain" else BRANCHES


@contextmanager
def watched(runner: Any, stages: Stages) -> Iterator[None]:
    """Time our functions in a runner, and vLLM's that they call."""
    import pytest
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from vllm_spec_ext.engine.trees import attention, block_copies
    from vllm_spec_ext.engine.v2.rejection import WalkSampler
    from vllm_spec_ext.engine.v2.runner import SpecRunnerV2Mixin

    with pytest.MonkeyPatch.context() as patch:

        def time_method(owner: Any, name: str, stage: str) -> None:
            patch.setattr(owner, name, stages.timed(stage, getattr(owner, name)))

        bases = type(runner).__mro__
        behind = bases[bases.index(SpecRunnerV2Mixin) + 1 :]
        overridden = {
            "finish_requests": "prepare",
            "gather_batch_req_state": "prepare",
            "sample_tokens": "draft",
        }
        for name, stage in overridden.items():
            time_method(next(base for base in behind if name in vars(base)), name, THEIRS)
            time_method(SpecRunnerV2Mixin, name, stage)
        time_method(SpecRunnerV2Mixin, "commit_trees", "commit")
        time_method(attention.TreeAttention, "begin", "prepare")
        time_method(attention, "expand_attention", "prepare")
        time_method(block_copies.LayerBlocks, "copy", "copies")
        for name in ("__call__", "_verify_in_chunks"):
            time_method(RejectionSampler, name, THEIRS)
        time_method(WalkSampler, "__call__", "verify")
        time_method(WalkSampler, "_verify", "verify")
        time_method(runner.sampler, "sample", THEIRS)
        time_method(runner.drafter._proposer, "propose", "propose")
        _time_results(runner, stages, patch)
        yield


def _time_results(runner: Any, stages: Stages, patch: Any) -> None:
    """Waiting for a step's tokens is vLLM's time."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    patch.setattr(AsyncOutput, "get_output", stages.timed(THEIRS, AsyncOutput.get_output))


def measure(
    engine: Any,
    prompts: Sequence[Any],
    params: Sequence[Any],
    profile: cProfile.Profile | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, float]]:
    """Milliseconds of each stage, of every step in which all requests verified a draft.

    Args:
        engine: An ``LLM`` on the V2 runner, in this process.
        prompts: One a request.
        params: ``SamplingParams`` of each.
        profile: Watches our stages, too.
        clock: Seconds.
    """
    core = engine.llm_engine
    runner = core.model_executor.driver_worker.worker.model_runner
    stages, steps = Stages(clock, profile), []
    for number, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
        core.add_request(f"host-work-{number}", prompt, given)
    with watched(runner, stages):
        while core.has_unfinished_requests():
            core.step()
            taken, step = stages.take(), runner.spec_step
            if step.started is not None and len(step.drafts) == len(prompts) and all(step.drafts):
                steps.append(taken)
    return steps


def medians(steps: Sequence[dict[str, float]], *, on_cpu: bool) -> dict[str, float]:
    """Of each stage, and of all of ours together.

    Args:
        steps: As of :func:`measure`.
        on_cpu: The CPU itself moves the blocks that are copied.
    """
    found = {stage: statistics.median(step[stage] for step in steps) for stage in STAGES}
    others = ("propose", "copies") if on_cpu else ("propose",)
    ours = [sum(step[stage] for stage in STAGES if stage not in others) for step in steps]
    return {**found, "ours": statistics.median(ours)}


def run_shape(
    shape: Literal["chain", "tree"] | str,
    batch_sizes: Sequence[int],
    model: Path,
    profile: cProfile.Profile | None,
    clock: Callable[[], float],
    repeats: int,
) -> dict[str, dict[str, Any]]:
    """Figures by batch size; two engines, one of which only knows the true answers."""
    from generation import sampling_params
    from tiny_engine import start_engine

    sizes: dict[str, Any] = {
        "max_num_seqs": max(batch_sizes),
        "max_num_batched_tokens": 2048,
        "model": model,
    }
    plain = start_engine(**sizes)
    engine = start_engine(speculative_config=config_of(shape), **sizes)
    prompts = [
        {"prompt_token_ids": [(7 * i * i + 3 * i + turn) % 500 + 5 for i in range(20 + turn % 20)]}
        for turn in range(max(batch_sizes))
    ]
    greedy = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
    answers = plain.generate(prompts, sampling_params(greedy), use_tqdm=False)
    truths = [list(out.outputs[0].token_ids) for out in answers]
    params = [sampling_params(greedy, {"truth": truth}) for truth in truths]
    from vllm.platforms import current_platform

    found = {}
    for size in batch_sizes:
        measure(engine, prompts[:size], params[:size])  # compiles, and fills caches
        steps = []
        for _ in range(repeats):
            engine.reset_prefix_cache()
            steps += measure(engine, prompts[:size], params[:size], profile, clock)
        engine.reset_prefix_cache()
        found[str(size)] = {"steps": len(steps), **medians(steps, on_cpu=current_platform.is_cpu())}
        print(table({shape: {str(size): found[str(size)]}}), file=sys.stderr, flush=True)
    return found


def table(result: dict[str, dict[str, dict[str, Any]]]) -> str:
    """For a terminal."""
    columns = ("ours", *STAGES)
    lines = [f"{'ms a step':>8} {'batch':>6} " + " ".join(f"{name:>8}" for name in columns)]
    for shape, sizes in result.items():
        for size, row in sizes.items():
            cells = " ".join(f"{row[name]:8.3f}" for name in columns)
            lines.append(f"{shape:>9} {size:>6} {cells}")
    return "\n".join(lines)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", default="1,8,64", help="comma-separated")
    parser.add_argument("--shape", choices=SHAPES, help="default: both")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="default: wall")
    parser.add_argument("--repeats", type=int, default=1, help="answers of each request")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--profile", type=Path, help="write cProfile's statistics here")
    given = parser.parse_args()
    batch_sizes = [int(size) for size in given.batch_size.split(",")]
    make_visible()
    from tiny_model import build_tiny_model

    from vllm_spec_ext.bench import provenance
    from vllm_spec_ext.proposers import registry

    registry.BUILTIN["branches"] = "drafters:Branches"
    profile = cProfile.Profile() if given.profile else None
    with tempfile.TemporaryDirectory(prefix="host-work-") as folder:
        model = build_tiny_model(Path(folder) / "tiny")
        shapes = SHAPES if given.shape is None else (given.shape,)
        clock = CLOCKS[given.clock]
        rest = (batch_sizes, model, profile, clock, given.repeats)
        result = {shape: run_shape(shape, *rest) for shape in shapes}
    print(table(result))
    if given.json:
        facts = provenance.collect(sys.argv)
        given.json.write_text(
            json.dumps({"provenance": facts, "clock": given.clock, "ms": result}, indent=1)
        )
    if profile is not None:
        profile.dump_stats(given.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
