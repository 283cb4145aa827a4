# SPDX-License-Identifier: Apache-2.0
"""How long a target step takes with so many draft tokens to verify, as a chain and as trees.

    python scripts/measure_step_times.py --model MODEL --json steps.json

One engine in this process, drafts of random tokens (which are nearly all rejected, so that every
step is alike). The shapes of one size take turns within a round, so that a busy machine slows all
of them; times are medians over all rounds.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from vllm_spec_ext.config import RequestOptions
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import BaseProposer, Draft, StepContext, proposer

Shape = Literal["chain", "wide", "binary", "star"]
SHAPES: dict[Shape, str] = {
    "chain": "no branches",
    "wide": "four chains side by side",
    "binary": "every node has two children",
    "star": "all nodes are children of the last token",
}


def parents_of(shape: Shape, size: int) -> list[int]:
    """Parents of a draft of this many nodes; parents first, the first path first."""
    if shape == "star":
        return [-1] * size
    if shape == "binary":
        return _depth_first_binary(size)
    width = min(4, size) if shape == "wide" else 1
    lengths = [size // width + (i < size % width) for i in range(width)]
    parents: list[int] = []
    for length in lengths:
        first = len(parents)
        parents += [-1, *range(first, first + length - 1)]
    return parents


def _depth_first_binary(size: int) -> list[int]:
    """A binary tree below the last token, as level as can be, listed depth first."""
    parents: list[int] = []

    def grow(parent: int, count: int) -> None:
        left = (count + 1) // 2
        for part in (left, count - left):
            if part:
                parents.append(parent)
                grow(len(parents) - 1, part - 1)

    grow(-1, size)
    return parents


class ProbeRequest(RequestOptions):
    """The draft that a request gets at every step."""

    shape: Shape = "chain"
    """Its form."""

    size: int = 0
    """Its number of nodes."""


@proposer(
    "probe",
    summary="Random drafts of a given form.",
    request_options=ProbeRequest,
    num_speculative_tokens=64,
    tree=True,
)
class Probe(BaseProposer):
    """Drafts what each request asks for."""

    def propose(self, step: StepContext) -> list[Draft]:
        """Tokens differ from step to step, so that nothing is accepted but by chance."""
        drafts = []
        for request in step.requests:
            options = request.options
            assert isinstance(options, ProbeRequest)
            size = min(options.size, request.room)
            tokens = (np.arange(size) * 7919 + len(request.token_ids) * 104_729) % 30_000 + 1_000
            parents = np.array(parents_of(options.shape, size), np.int32)
            drafts.append(
                Draft(tokens.astype(np.int32), None if options.shape == "chain" else parents)
            )
        return drafts


def step_times(engine: Any, prompts: Sequence[Any], size: int, shape: Shape, steps: int) -> Any:
    """Seconds of each decoding step of a batch, without its prefill."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=steps + size + 4,  # room for the whole draft up to the last step that counts
        ignore_eos=True,
        extra_args={"spec_ext": {"shape": shape, "size": size}},
    )
    names = [f"probe-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    for _ in range(len(prompts) + 1):  # prefills, then the first drafts
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return times


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All sizes and shapes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    registry.BUILTIN["probe"] = "measure_step_times:Probe"
    from vllm import LLM

    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=max(2, arguments.batch),
        max_num_batched_tokens=max(2048, arguments.batch * (max(arguments.sizes) + 1)),
        block_size=32,
        kv_cache_memory_bytes=512 << 20,
        enable_prefix_caching=False,
        speculative_config={"method": "probe", "num_speculative_tokens": max(arguments.sizes)},
    )
    engine = llm.llm_engine
    rng = np.random.default_rng(0)
    prompts = rng.integers(1_000, 30_000, (arguments.batch, arguments.context)).tolist()
    times: dict[tuple[int, str], list[float]] = {}
    for size in arguments.sizes:
        for turn in range(arguments.rounds + 1):
            for shape in SHAPES:
                found = step_times(engine, prompts, size, shape, arguments.steps)
                if turn:  # the first one warms up
                    times.setdefault((size, shape), []).extend(found)
        row = "  ".join(f"{s} {statistics.median(times[size, s]) * 1e3:7.1f}" for s in SHAPES)
        print(f"{size:3d} nodes, ms: {row}", flush=True)
    rows = [
        {"nodes": size, **{s: round(statistics.median(times[size, s]) * 1e3, 2) for s in SHAPES}}
        for size in arguments.sizes
    ]
    settings = {name: getattr(arguments, name) for name in ("context", "batch", "dtype")}
    return {"unit": "ms", **settings, "rows": rows}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 24, 32, 48, 64])
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--batch", type=int, default=1, help="requests in each step")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the table here")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
