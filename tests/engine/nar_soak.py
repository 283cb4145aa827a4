# SPDX-License-Identifier: Apache-2.0
"""Many steps of ``nar`` on the tiny model: requests come, end, are aborted and are preempted.

    python tests/engine/nar_soak.py --steps 100000

What is held is looked at all the while: the drafter may know requests that are not finished, and no
others, and memory must not grow. When all have ended, no container of the process may hold the
name of one.
"""

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

NAME = "soak-"
AT_ONCE = 10  # two more than run at a time
FEW_BLOCKS = 16  # for eight requests of up to five
SAMPLES = 20


@dataclass
class Soak:
    """What was seen."""

    steps: int = 0
    seconds: float = 0.0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    passes: int = 0  # of the drafter
    most_known: int = 0  # requests at a time that the drafter has books of
    overdue: int = 0  # of these, requests that had ended two steps before; over all steps
    memory_mib: list[float] = field(default_factory=list)  # resident, at even distances
    while_running: list[str] = field(default_factory=list)  # as `left`, of running requests
    left: list[str] = field(default_factory=list)  # containers that hold names of old requests


def soak(engine: Any, num_steps: int, seed: int = 0) -> Soak:
    """Run so many steps of an ``LLM`` that drafts with ``nar`` in this process."""
    core, draws, report = engine.llm_engine, random.Random(seed), Soak(steps=num_steps)
    drafter = core.model_executor.driver_worker.worker.model_runner.drafter
    (model,) = drafter.models.block_models
    scheduler = core.engine_core.engine_core.scheduler
    preempt, passes = scheduler._preempt_request, model.counts.forwards
    alive: list[str] = []
    ended: deque[list[str]] = deque([[], []], maxlen=2)
    number, started = 0, time.monotonic()

    def count(*given: Any, **more: Any) -> Any:
        report.preempted += 1
        return preempt(*given, **more)

    def end(name: str) -> None:
        alive.remove(name)
        ended[-1].append(name)

    scheduler._preempt_request = count
    try:
        for step in range(num_steps):
            ended.append([])
            while len(alive) < AT_ONCE and draws.random() < 0.5:
                alive.append(f"{NAME}{number}")
                number += 1
                _add(core, draws, alive[-1])
            if alive and draws.random() < 0.02:
                name = draws.choice(alive)
                core.abort_request([name])
                end(name)
                report.aborted += 1
            for out in core.step():
                if out.finished and out.request_id in alive:
                    end(out.request_id)
                    report.finished += 1
            known = _known(drafter, model)
            report.most_known = max(report.most_known, len(known))
            report.overdue += len(known.difference(alive, *ended))
            known.clear()
            if step % max(1, num_steps // SAMPLES) == 0:
                report.memory_mib.append(_resident_mib())
        report.while_running = _holders()
        core.abort_request(alive)
        report.aborted += len(alive)
        for token in (5, 6, 7):  # ends are told of with the next request
            engine.generate({"prompt_token_ids": [token]}, use_tqdm=False)
    finally:
        scheduler._preempt_request = preempt
    report.memory_mib.append(_resident_mib())
    report.seconds = round(time.monotonic() - started, 1)
    report.passes = model.counts.forwards - passes
    alive.clear()
    ended.clear()
    report.left = _holders()
    return report


def _known(drafter: Any, model: Any) -> set[str]:
    """Requests that the drafter has books of; vLLM adds a suffix to their names."""
    proposer = drafter._proposer
    books = [model._known, proposer._payoff._pending]
    if proposer._hints is not None:
        books += [proposer._hints._texts._texts, proposer._hints._drafts]
    return {"-".join(name.split("-")[:2]) for book in books for name in book}


def _resident_mib() -> float:
    return round(psutil.Process().memory_info().rss / 2**20, 1)


def _add(core: Any, draws: random.Random, name: str) -> None:
    from vllm import SamplingParams

    beginning = [(7 * i * i + 3 * i + draws.randrange(3)) % 500 + 5 for i in range(60)]
    prompt = beginning[: draws.choice((0, 0, 20, 60))]
    prompt += [draws.randrange(5, 505) for _ in range(draws.randrange(1, 30))]
    given: dict[str, Any] = {"max_tokens": draws.randrange(1, 70), "ignore_eos": True}
    if draws.random() < 0.4:
        given["allowed_token_ids"] = [40, 42, 44]  # a text that repeats itself, so copies are right
    if draws.random() < 0.3:
        given["temperature"] = 1.0
    params = SamplingParams(**{"temperature": 0.0, "detokenize": False, **given})
    core.add_request(name, {"prompt_token_ids": prompt}, params)


def _holders() -> list[str]:
    """Containers anywhere in this process that hold names of requests, and their owners."""
    gc.unfreeze()  # vLLM freezes what is there when an engine has started
    gc.collect()
    objects = gc.get_objects()
    found = {id(one): one for one in objects if _names(one)}
    for one in objects:
        for part in gc.get_referents(one):
            if not gc.is_tracked(part) and _names(part):  # as dicts of numbers are
                found[id(part)] = part
    del one, part
    holders, lines = list(found.values()), []
    ours = {id(objects), id(found), id(holders)}
    for holder in holders:
        owners = [owner for owner in gc.get_referrers(holder) if id(owner) not in ours]
        kinds = sorted({type(owner).__name__ for owner in owners}) or ["nothing"]
        lines.append(f"{type(holder).__name__} of {', '.join(kinds)}: {_names(holder)[:3]}")
    return lines


def _names(found: Any) -> list[str]:
    # Not isinstance(): it would ask some objects of torch for their class, and they warn.
    if not issubclass(type(found), dict | set | list | tuple | deque):
        return []
    return [name for name in list(found) if isinstance(name, str) and name[:5] == NAME != name]


def main() -> int:
    """Start an engine that has too little memory for its requests, and soak it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tree", action="store_true", help="draft trees")
    given = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # oneDNN keeps a compiled product for each of the last 1024 shapes; with few of them, what grows
    # is what leaks.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    from save_dflash import ALL_EXTRAS, save_dflash
    from tiny_engine import start_engine
    from tiny_model import build_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        target = build_tiny_model(Path(folder) / "target")
        extras: dict[str, Any] = {"seed": 6, "nar": ALL_EXTRAS, "own_mask_embedding": True}
        config = {
            "method": "nar",
            "model": save_dflash(target, Path(folder) / "drafter", **extras),
            "num_speculative_tokens": 12 if given.tree else 6,
            "tree": given.tree,
            "adaptive_length": False,
        }
        engine = start_engine(target, speculative_config=config, num_gpu_blocks_override=FEW_BLOCKS)
        report = soak(engine, given.steps)
        print(json.dumps(asdict(report)))
        engine.llm_engine.engine_core.shutdown()
    return int(bool(report.left) or report.overdue > 0)


if __name__ == "__main__":
    sys.exit(main())
