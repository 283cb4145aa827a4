# SPDX-License-Identifier: Apache-2.0
"""How long a target step takes with so many draft tokens to verify, as a chain and as trees.

    python -m vllm_spec_ext.bench.step_probe --model MODEL --json steps.json

One engine in this process, drafts of random tokens (which are nearly all rejected, so that every
step is alike). Every batch size, size and shape has its turn in each round, so that a machine that
slows down slows all of them; times are medians over all rounds. ``vllm-spec plan`` runs it.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from vllm_spec_ext.bench.engine_memory import memory_args
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import RequestOptions
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import BaseProposer, Draft, EngineHandle, StepContext, proposer
from vllm_spec_ext.proposers.draft_tree import chain_parents

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

METHOD = "step_probe"
MIN_BATCHED_TOKENS = 2048
Shape = Literal["chain", "wide", "binary", "star"]
"""No branches; four chains side by side; two children of every node; all nodes side by side."""

SHAPES: tuple[Shape, ...] = get_args(Shape)


def parents_of(shape: Shape, size: int) -> list[int]:
    """Parents of a draft of this many nodes; parents first, the first path first."""
    if shape == "star":
        return [-1] * size
    if shape == "binary":
        return _depth_first_binary(size)
    width = min(4, size) if shape == "wide" else 1
    parents: list[int] = []
    for chain in range(width):
        length = size // width + (chain < size % width)
        first = len(parents)
        parents += [-1 if parent < 0 else first + parent for parent in chain_parents(length)]
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
    METHOD,
    summary="Random drafts of a given form.",
    request_options=ProbeRequest,
    num_speculative_tokens=64,
    tree=True,
)
class Probe(BaseProposer):
    """Drafts what each request asks for; known to the registry of this program alone."""

    def propose(self, step: StepContext) -> list[Draft]:
        """Tokens differ from step to step, so that nothing is accepted but by chance."""
        drafts = []
        for request in step.requests:
            options = request.options
            assert isinstance(options, ProbeRequest)
            size = min(options.size, request.room)
            tokens = np.arange(size) * 7_919 + len(request.token_ids) * 104_729
            parents = np.array(parents_of(options.shape, size), np.int32)
            drafts.append(
                Draft(
                    (tokens % self._vocab_size).astype(np.int32),
                    None if options.shape == "chain" else parents,
                )
            )
        return drafts

    def start(self, engine: EngineHandle) -> None:
        """Note the vocabulary."""
        self._vocab_size = engine.vocab_size


def answer_tokens(steps: int, size: int, prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of an answer that is long enough: one a step, some while others are prefilled."""
    prefill_steps = sum(len(prompt) // MIN_BATCHED_TOKENS + 1 for prompt in prompts)
    return prefill_steps + steps + size + 4


def step_times(
    engine: "LLMEngine", prompts: Sequence[Any], size: int, shape: Shape, steps: int
) -> Any:
    """Seconds of each decoding step of a batch, without its prefill."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        # Room for the whole draft up to the last step that counts.
        max_tokens=answer_tokens(steps, size, prompts),
        ignore_eos=True,
        extra_args={"spec_ext": {"shape": shape, "size": size}},
    )
    names = [f"probe-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    waiting = set(names)
    while waiting:  # for prefills, which may take several steps
        waiting -= {out.request_id for out in engine.step() if out.outputs[0].token_ids}
    engine.step()  # the first one with drafts of all
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - start)
        if len(outputs) != len(prompts):
            raise RuntimeError(f"{len(outputs)} of {len(prompts)} requests were in a timed step")
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return times


def measure(
    model: str,
    *,
    sizes: Sequence[int],
    batch_sizes: Sequence[int] = (1,),
    shapes: Sequence[Shape] = ("chain",),
    context: int = 256,
    steps: int = 8,
    rounds: int = 3,
    engine_args: dict[str, Any] | None = None,
    report: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Median times; starts an engine in this process, which should end soon after.

    Args:
        model: Name or folder of the target.
        sizes: Numbers of draft nodes a request; 0 is plain decoding.
        batch_sizes: Requests in a step.
        shapes: Forms of the drafts.
        context: Tokens of the prompts.
        steps: Timed steps of each run.
        rounds: Runs of each size and shape.
        engine_args: Other arguments of ``vllm.LLM``.
        report: Receives a line for each round and size.

    Returns:
        Rows with ``batch``, ``nodes`` and the milliseconds of each shape.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    registry.BUILTIN[METHOD] = "vllm_spec_ext.bench.step_probe:Probe"
    from vllm import LLM
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    most, largest = max(batch_sizes), max(1, *sizes)
    length = context + answer_tokens(steps, largest, [range(context)] * most)
    arguments: dict[str, Any] = {
        "enforce_eager": cpu,  # as servers run
        "max_model_len": max(2048, length),
        "enable_prefix_caching": False,
        **({"block_size": 32} if cpu else {}),  # as in `bench`
        **memory_args(engine_args or {}, cpu=cpu, num_engines=1, default_share=1.0),
        **(engine_args or {}),
        "max_num_seqs": max(2, most),
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, most * (largest + 1)),
        "speculative_config": {
            "method": METHOD,
            "num_speculative_tokens": largest,
            "adaptive_length": False,
        },
    }
    if arguments["max_model_len"] < length:
        raise SpecExtError(
            f"steps after {context} tokens take max_model_len={length}; found "
            f"{arguments['max_model_len']}; raise it or lower --context"
        )
    engine = LLM(model, **arguments).llm_engine
    vocab_size = engine.model_config.get_vocab_size()
    prompts = np.random.default_rng(0).integers(0, vocab_size, (most, context)).tolist()
    cases = [(batch, size, shape) for batch in batch_sizes for size in sizes for shape in shapes]
    times: dict[tuple[int, int, str], list[float]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        report("warming up" if not turn else f"round {turn} of {rounds}")
        for batch, size, shape in cases:
            found = step_times(engine, prompts[:batch], size, shape, steps)
            times[batch, size, shape] += found if turn else []
    rows: list[dict[str, Any]] = []
    for batch, size in itertools.product(batch_sizes, sizes):
        medians = {s: round(statistics.median(times[batch, size, s]) * 1e3, 2) for s in shapes}
        row: dict[str, Any] = {"batch": batch, "nodes": size}
        rows.append(row | medians)
        shown = "  ".join(f"{shape} {value:.1f}" for shape, value in medians.items())
        report(f"batch {batch}, {size} nodes a request, ms: {shown}")
    return rows


def main() -> None:
    """Measure, print, and write what was measured; exit status 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16, 24, 32, 48, 64])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompts")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON")
    parser.add_argument("--json", type=Path, help="write the table here")
    given = vars(parser.parse_args())
    path: Path | None = given.pop("json")
    try:
        rows = measure(**given)
    except SpecExtError as error:
        parser.exit(2, f"SpecExtError: {error}\n")
    if path is not None:
        given["rows"] = rows
        path.write_text(json.dumps(given, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
