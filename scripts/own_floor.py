# SPDX-License-Identifier: Apache-2.0
"""How slow the slowest 200 steps of an engine are beside plain steps of the same engine.

    python scripts/own_floor.py MODEL --method auto --batch-size 16 --dataset gsm8k=gsm8k.jsonl:40

Two engines on one machine differ by more than what drafts may lose, from process to process. So
one engine answers here, and each step is compared with the eight nearest ones in which nothing was
verified, less what drafting took in them. These are plain decoding's, but for what every step of an
engine with a ``speculative_config`` takes on the host. A stretch is 200 steps in a row of one kind
of text with all places of the batch filled, steps with prefill left out.

Printed for each kind: its steps, those that verified drafts, their tokens for each request, the
speed of all of them and of the slowest stretch, plain decoding being 1. ``noise`` is the slowest
stretch of every other plain step beside the rest of them: so much is none of the drafts' doing.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.bench.windows import NUM_STEPS, lowest_speed

NUM_NEXT = 8  # plain steps next to a step that it is compared with


@dataclass(frozen=True)
class Step:
    """A step of all requests, without prefill."""

    num_tokens: int  # of all requests together
    num_requests: int
    num_drafted: int  # verified draft tokens
    seconds: float
    drafting_s: float  # of these

    @property
    def plain_s(self) -> float | None:
        """What a plain step took, if it was one."""
        return self.seconds - self.drafting_s if not self.num_drafted else None


def measure(engine: Any, prompts: Sequence[Any], params: Any, batch_size: int) -> list[Step]:
    """Answer all prompts; the steps in which every place was filled, in their order.

    Args:
        engine: An ``LLM`` in this process on the V1 runner.
        prompts: With token ids.
        params: ``SamplingParams`` of each.
        batch_size: Places.
    """
    core = engine.llm_engine
    runner = core.model_executor.driver_worker.worker.model_runner
    drafts, taken = runner.step_drafts, [0.0]
    make = drafts.make

    def timed(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return make(*args)
        finally:
            taken[0] = time.perf_counter() - started

    drafts.make = timed
    known: dict[str, int] = {}
    steps = []
    try:
        for number, prompt in enumerate(prompts):
            core.add_request(f"own-floor-{time.monotonic_ns()}-{number}", prompt, params)
        while core.has_unfinished_requests():
            taken[0], started = 0.0, time.perf_counter()
            outputs = core.step()
            seconds, step = time.perf_counter() - started, runner.spec_step
            new = 0
            for output in outputs:
                size = len(output.outputs[0].token_ids)
                new += size - known.get(output.request_id, 0)
                known[output.request_id] = size
            if step.started is not None and len(step.request_ids) == batch_size:
                drafted = sum(map(len, step.drafts))
                steps.append(Step(new, batch_size, drafted, seconds, taken[0]))
    finally:
        del drafts.make
    return steps


def references(steps: Sequence[Step]) -> NDArray[np.float64]:
    """[num_steps] what a plain step took at each, by those next to it; NaN if there are none.

    A machine's speed changes within a stretch, too.
    """
    known = [(at, step.plain_s) for at, step in enumerate(steps) if step.plain_s is not None]
    places = np.array([at for at, _ in known])
    taken = np.array([seconds for _, seconds in known])
    if not known:
        return np.full(len(steps), np.nan)
    found = []
    for at in range(len(steps)):
        nearest = np.argsort(np.abs(places - at), kind="stable")[:NUM_NEXT]
        found.append(taken[nearest].mean())
    return np.array(found)


def slowest(would_take: NDArray[np.float64], taken: NDArray[np.float64]) -> float:
    """Lowest speed of any stretch; NaN if there are no steps."""
    if not len(would_take):
        return float("nan")
    return lowest_speed(np.stack([taken, would_take], axis=1), NUM_STEPS)


def noise(steps: Sequence[Step]) -> float:
    """The slowest stretch of every other plain step, by the reference that the others give."""
    plain = [step for step in steps if step.plain_s is not None]
    halved = [
        step if at % 2 else replace(step, num_drafted=1) for at, step in enumerate(plain)
    ]  # as if those had drafted
    taken = np.array([step.seconds - step.drafting_s for step in plain])[::2]
    return slowest(references(halved)[::2], taken)


def row(kind: str, steps: Sequence[Step]) -> dict[str, Any]:
    """The figures of one kind of text."""
    tokens = np.array([step.num_tokens / step.num_requests for step in steps])
    taken = np.array([step.seconds for step in steps])
    plain = references(steps)
    would_take = tokens * plain
    return {
        "kind": kind,
        "steps": len(steps),
        "drafted": sum(step.num_drafted > 0 for step in steps),
        "tokens/step": round(float(tokens.mean()), 3) if len(steps) else None,
        "plain_ms": round(1e3 * float(plain.mean()), 1) if len(steps) else None,
        "speed": round(float(would_take.sum() / taken.sum()), 3) if len(steps) else None,
        "slowest": round(slowest(would_take, taken), 3),
        "noise": round(noise(steps), 3),
    }


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--method", default="auto", help="name, or JSON of a speculative_config")
    parser.add_argument("--dataset", action="append", required=True, help="as of `vllm-spec bench`")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path, help="write the figures and all steps here, too")
    given = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    from vllm_spec_ext.bench import datasets

    config = given.method if given.method.startswith("{") else json.dumps({"method": given.method})
    engine = LLM(
        model=given.model,
        dtype="float32",
        seed=0,
        max_model_len=2048,
        max_num_seqs=given.batch_size,
        kv_cache_memory_bytes=2 << 30,
        speculative_config=json.loads(config),
    )
    tokenizer = engine.get_tokenizer()
    params = SamplingParams(temperature=given.temperature, max_tokens=given.max_tokens)
    questions = datasets.load(datasets.parse(given.dataset))
    rows, kept = [], {}
    for kind, group in groupby(sorted(questions, key=lambda q: q.category), lambda q: q.category):
        prompts = [
            {
                "prompt_token_ids": tokenizer.apply_chat_template(
                    list(question.opening), add_generation_prompt=True, return_dict=False
                )
            }
            for question in group
        ]
        steps = measure(engine, prompts, params, given.batch_size)
        kept[kind] = [vars(step) for step in steps]
        rows.append(row(kind, steps))
        print(json.dumps(rows[-1]), flush=True)
    if given.json:
        from vllm_spec_ext.bench import provenance

        facts = provenance.collect(sys.argv)
        given.json.write_text(json.dumps({"provenance": facts, "rows": rows, "steps": kept}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
