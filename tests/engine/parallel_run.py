# SPDX-License-Identifier: Apache-2.0
"""Generates with two tensor-parallel ranks; a script, not a test.

Standard input holds ``{"engine": arguments of LLM, "results": file}``; the results are tokens of
:data:`NAMES` and what both ranks did.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

from generation import run, tokens
from scenarios import SCENARIOS, Scenario

NAMES = ("mixed_lengths", "seeded", "few_tokens")
SAMPLED = Scenario([{"max_tokens": 60, "temperature": 1.0}], SCENARIOS["mixed_lengths"].prompts)


def random_state(worker: Any) -> int:
    """Stands for the state of a rank's global generator."""
    import torch

    return crc32(torch.get_rng_state().numpy().tobytes())


def version_steps(worker: Any) -> list[float]:
    """Requests' steps of the version in use and of the weights of the start; none elsewhere."""
    online = worker.model_runner.drafter.online
    return [] if online is None else [online._trial.serving.count, online._trial.guard.count]


def verdicts(worker: Any) -> list[str]:
    """Why versions were kept or not; none elsewhere."""
    online = worker.model_runner.drafter.online
    return [] if online is None else [verdict.reason for verdict in online.state.verdicts]


def main() -> None:
    """One engine; its scenarios, and what its ranks say of themselves."""
    given = json.load(sys.stdin)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # random_state is sent to the workers
    from vllm import LLM

    engine = LLM(**given["engine"], tensor_parallel_size=2)
    found: dict[str, Any] = {name: tokens(run(engine, SCENARIOS[name])) for name in NAMES}
    found["accepted"] = sum(
        metric.value
        for metric in engine.get_metrics()
        if metric.name == "vllm:spec_decode_num_accepted_tokens"
    )
    found["timed"] = [len(stats["propose_us"]) for stats in engine.collective_rpc("spec_ext_stats")]
    run(engine, SAMPLED)
    found["random"] = engine.collective_rpc(random_state)
    found["version_steps"] = [
        count for counts in engine.collective_rpc(version_steps) for count in counts
    ]
    found["verdicts"] = [reason for each in engine.collective_rpc(verdicts) for reason in each]
    engine.collective_rpc("spec_ext_reset")
    found["again"] = tokens(run(engine, SCENARIOS["mixed_lengths"]))
    Path(given["results"]).write_text(json.dumps(found))
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
