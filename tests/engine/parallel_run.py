# SPDX-License-Identifier: Apache-2.0
"""Generates with two tensor-parallel ranks; a script, not a test.

Each line of standard input holds ``{"engine": arguments of LLM, "results": file, "token_costs":
[...]}``; the results are tokens of :data:`NAMES` and what both ranks did, and a line of standard
output says that they are there, or that there are none. With costs no clock decides what is
drafted: steps take what they say, and a repetitive text is generated once at each of them. Every
engine has processes of its own, and all are forked from this one, which has imported vLLM: that
takes longer than what they do.
"""

import importlib
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the cores that the tests were given
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the workers
# With several ranks vLLM compiles what finds a rank's part of the vocabulary, in each process of
# each engine, which takes longer than all that is then computed.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from generation import run, tokens
from one_process import once
from scenarios import REPETITIVE, SCENARIOS, Scenario
from vllm import LLM
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.triton_utils import dispatcher
from vllm.v1.engine import utils as engine_processes
from vllm.v1.executor import multiproc_executor

# What vLLM imports only when an engine starts, in each of its processes.
LATER = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm_spec_ext.engine.cpu_worker",
)
NAMES = ("mixed_lengths", "seeded", "few_tokens")
SAMPLED = Scenario([{"max_tokens": 60, "temperature": 1.0}], SCENARIOS["mixed_lengths"].prompts)


def random_state(worker: Any) -> int:
    """Stands for the state of a rank's global generators."""
    import numpy as np
    import torch

    state = crc32(torch.get_rng_state().numpy().tobytes())
    if hasattr(worker.model_runner, "req_states"):  # V2 draws the seeds of requests from numpy's
        state = crc32(np.random.get_state(legacy=False)["state"]["key"].tobytes(), state)
    return state


def version_steps(worker: Any) -> list[float]:
    """Requests' steps of the version in use and of the weights of the start; none elsewhere."""
    online = worker.model_runner.drafter.online
    return [] if online is None else [online._trial.serving.count, online._trial.guard.count]


def count_exchanges(worker: Any) -> None:
    """From now on, of the weights that a drafter learns."""
    online = worker.model_runner.drafter.online
    if online is None:
        return
    use, worker.num_exchanges = online._learner.use_weights, 0

    def counted(weights: Any) -> None:
        worker.num_exchanges += 1
        use(weights)

    online._learner.use_weights = counted


def num_exchanges(worker: Any) -> int:
    """What was counted; 0 on ranks that follow another."""
    return int(getattr(worker, "num_exchanges", 0))


def drafting(worker: Any) -> str:
    """How a rank gets its drafts."""
    return "late" if getattr(worker.model_runner, "late_steps", None) is not None else "waiting"


def watch_drafts(worker: Any) -> None:
    """From now on, keep what this rank takes for the drafts of each step."""
    step_drafts = worker.model_runner.step_drafts
    make, decide, worker.drafts, worker.num_decided = step_drafts.make, step_drafts.decide, [], 0

    def watched(*args: Any) -> list[list[int]]:
        drafts = make(*args)
        worker.drafts.append(drafts)
        return drafts

    def counted(*args: Any) -> Any:
        worker.num_decided += 1
        return decide(*args)

    step_drafts.make, step_drafts.decide = watched, counted


def drafts(worker: Any) -> list[list[list[int]]]:
    """What was kept since this was asked for last: of each step, draft tokens of each request."""
    kept, worker.drafts = worker.drafts, []
    return kept


def num_decided(worker: Any) -> int:
    """Steps whose drafts this rank decided on, or that it let rest."""
    return int(worker.num_decided)


def without_clock(worker: Any) -> None:
    """From now on, the budget of this rank is told other times than those that were measured."""
    budget = worker.model_runner.step_drafts.budget
    verified, drafted, rested = budget.verified, budget.drafted, budget.rested

    def told_verified(
        num_requests: int, num_drafted: int, num_emitted: int, time: Any, *more: int
    ) -> None:
        seconds = 0.03 * (1.0 + 0.02 * num_requests + worker.token_cost * num_drafted)
        verified(num_requests, num_drafted, num_emitted, None if time is None else seconds, *more)

    def told_drafted(times: dict[str, float]) -> None:
        drafted(dict.fromkeys(times, 0.0003))

    def told_rested(num_requests: int, *times: float) -> None:
        rested(num_requests, 0.03 * (1.0 + 0.02 * num_requests), 0.00003)

    budget.verified, budget.drafted, budget.rested = told_verified, told_drafted, told_rested


def set_token_cost(worker: Any, cost: float) -> None:
    """What a draft token adds to a step; what the second rank is told would end all drafts."""
    worker.token_cost = cost if worker.rank == 0 else 1.0


def verdicts(worker: Any) -> list[str]:
    """Why versions were kept or not; none elsewhere."""
    online = worker.model_runner.drafter.online
    return [] if online is None else [verdict.reason for verdict in online.state.verdicts]


def generate(engine_arguments: dict[str, Any], results: Path, token_costs: Sequence[float]) -> None:
    """One engine; its scenarios, and what its ranks say of themselves."""
    engine = LLM(**engine_arguments, tensor_parallel_size=2)
    engine.collective_rpc(count_exchanges)
    engine.collective_rpc(watch_drafts)
    if token_costs:
        engine.collective_rpc(without_clock)
        engine.collective_rpc(set_token_cost, args=(token_costs[0],))
    found: dict[str, Any] = {name: tokens(run(engine, SCENARIOS[name])) for name in NAMES}
    found["accepted"] = sum(
        metric.value
        for metric in engine.get_metrics()
        if metric.name == "vllm:spec_decode_num_accepted_tokens"
    )
    found["scheduled"] = engine.collective_rpc(drafting)
    found["timed"] = [len(stats["propose_us"]) for stats in engine.collective_rpc("spec_ext_stats")]
    found["repeated"] = tokens(run(engine, SCENARIOS["mixed_lengths"]))
    found["exchanges"] = sum(engine.collective_rpc(num_exchanges))
    run(engine, SAMPLED)
    found["random"] = engine.collective_rpc(random_state)
    found["version_steps"] = [
        count for counts in engine.collective_rpc(version_steps) for count in counts
    ]
    found["verdicts"] = [reason for each in engine.collective_rpc(verdicts) for reason in each]
    found["drafts"] = engine.collective_rpc(drafts)
    found["at_costs"] = []
    for cost in token_costs:
        engine.collective_rpc(set_token_cost, args=(cost,))
        generated = tokens(run(engine, REPETITIVE))
        found["at_costs"].append({"tokens": generated, "drafts": engine.collective_rpc(drafts)})
    found["decided"] = engine.collective_rpc(num_decided)
    engine.collective_rpc("spec_ext_reset")
    found["again"] = tokens(run(engine, SCENARIOS["mixed_lengths"]))
    partial = results.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.rename(results)
    engine.llm_engine.engine_core.shutdown(timeout=0.1)


def main() -> None:
    """A child for each line."""
    # vLLM's CPU platform has its processes spawned.
    for module in (engine_processes, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    # vLLM's own ranks wait for each other by spinning: on cores that others use, too, that takes
    # whole time slices.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    dispatcher.register_kernels = once(dispatcher.register_kernels)
    for name in LATER:
        importlib.import_module(name)
    for line in sys.stdin:
        given = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                generate(given["engine"], Path(given["results"]), given["token_costs"])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        print("done", flush=True)


if __name__ == "__main__":
    main()
