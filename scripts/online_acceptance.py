# SPDX-License-Identifier: Apache-2.0
"""Acceptance against tokens served, of a drafter that learns while it serves several domains.

    python scripts/online_acceptance.py MODEL DRAFTER FOLDER --domain maths=gsm8k.jsonl:question \
        --domain chat=instructions.jsonl:prompt --order maths,chat,maths --requests 300

The drafter is of the method `blockwise`, or of `nar` with ``--method nar --draft-tokens 6``.

One engine answers the domains in that order, greedily, some requests at a time. The weights of the
start draft a share of all steps (``--guard``), so that the frozen drafter is measured on the same
requests. One line of JSON is printed for each window of requests; `--plot FILE` draws them.

The trainer runs beside it (``vllm-spec online train FOLDER --budget 0.5``, or ``--start-trainer``),
or, with ``--train-share 0.2``, in turns with it: after each window for that share of its time, so
that a machine with one free core gives the same result each time.
"""

import argparse
import gzip
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Before vLLM is imported: the engine in this process, where its session can be read.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def read_prompts(source: str) -> list[str]:
    """Prompts of ``FILE:KEY``, JSON lines, packed by gzip or not; each one once."""
    path, _, key = source.rpartition(":")
    data = Path(path).read_bytes()
    text = (gzip.decompress(data) if path.endswith(".gz") else data).decode()
    return list(dict.fromkeys(str(json.loads(line)[key]) for line in text.split("\n") if line))


def take_prompts(domains: Sequence[str]) -> dict[str, Iterator[str]]:
    """Prompts of each ``NAME=FILE:KEY``, one after the other."""
    named = (domain.partition("=") for domain in domains)
    return {name: iter(read_prompts(source)) for name, _, source in named}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """What is served, and with which drafter; :func:`start_engine` takes it."""
    parser.add_argument("model")
    parser.add_argument("drafter")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", default="blockwise", help="blockwise or nar")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--domain", action="append", required=True, help="NAME=FILE:KEY")
    parser.add_argument("--dtype", default="float32", help="of the target")
    parser.add_argument("--batch", type=int, default=8, help="requests at a time")


def start_engine(given: argparse.Namespace, online: dict[str, Any]) -> tuple[Any, Any]:
    """An engine whose drafter learns.

    Args:
        given: Arguments of :func:`add_engine_arguments`.
        online: Options of ``online``.

    Returns:
        The engine, and the session of its drafter.
    """
    from vllm import LLM

    llm: Any = LLM(
        given.model,
        dtype=given.dtype,
        max_model_len=1024,
        max_num_seqs=given.batch,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={
            "method": given.method,
            "model": given.drafter,
            "num_speculative_tokens": given.draft_tokens,
            "adaptive_length": False,
            "online": online,
        },
    )
    return llm, llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.online


def make_trainer(folder: Path) -> Any:
    """In this process, on one core as the engine."""
    import torch

    from vllm_spec_ext.online.folder import FolderFacts, read_record
    from vllm_spec_ext.online.student import make_student
    from vllm_spec_ext.online.trainer import Trainer

    facts = read_record(folder, FolderFacts)
    assert facts is not None
    return Trainer(folder, make_student(facts, torch.device("cpu")), facts)


def train_for(trainer: Any, seconds: float) -> int:
    """Train for so long, if there is something to learn; training steps so far."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not trainer.advance():
        pass
    return int(trainer.steps)


def learned(line: dict[str, Any]) -> float | None:
    """Accepted draft tokens a request's step of what was learned: of the version in use, and of the
    one on trial."""
    roles = [role for role in ("serving", "trial") if role in line["steps"]]
    steps = sum(line["steps"][role] for role in roles)
    total = sum(line["steps"][role] * line["accepted_a_step"][role] for role in roles)
    return total / steps if steps else None


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """Acceptance of the frozen drafter and of the learning one against tokens served."""
    from vllm_spec_ext.bench.figures import subplots, write

    figure, (axes,) = subplots(1, height=3.6)
    served = [line["served"] / 1000 for line in lines]
    frozen = [line["accepted_a_step"].get("start") for line in lines]
    axes.plot(served, frozen, marker=".", color="#999999", label="frozen")
    axes.plot(served, list(map(learned, lines)), marker=".", color="#44658f", label="learning")
    began = 0.0
    for place, line in enumerate(lines):
        if place == 0 or lines[place - 1]["domain"] != line["domain"]:
            began = served[place - 1] if place else 0.0
            axes.axvline(began, color="black", linewidth=0.8)
            axes.annotate(
                line["domain"],
                (began, 1.0),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                xytext=(4, -12),
                fontsize="small",
            )
    axes.set(xlabel="thousand tokens served", ylabel="draft tokens accepted a step")
    axes.legend(fontsize="small")
    write(figure, file)


def parse_arguments() -> argparse.Namespace:
    """What is served, and how."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_engine_arguments(parser)
    parser.add_argument("--order", required=True, help="names of domains, separated by commas")
    parser.add_argument("--requests", type=int, default=300, help="of each domain in the order")
    parser.add_argument("--window", type=int, default=25, help="requests of a line")
    parser.add_argument("--tokens", type=int, default=96, help="most of an answer")
    parser.add_argument("--guard", type=float, default=0.25)
    parser.add_argument("--option", action="append", default=[], help="of online, NAME=JSON")
    parser.add_argument("--start-trainer", action="store_true")
    parser.add_argument("--plot", type=Path, help="draw the lines to this file")
    parser.add_argument("--train-share", type=float, default=0.0, help="of the serving time")
    return parser.parse_args()


def main() -> None:
    """Serve, print a line a window, and draw them if asked to."""
    given = parse_arguments()
    from vllm import SamplingParams

    online: dict[str, Any] = {"folder": str(given.folder), "guard": given.guard}
    for option in given.option:
        name, _, value = option.partition("=")
        online[name] = json.loads(value)
    llm, session = start_engine(given, {**online, "start_trainer": given.start_trainer})
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    count = session._trial.count

    def counted(role: str, accepted: int, *, compared: bool = True) -> None:
        at_start = role == "guard" or (role == "serving" and session.state.serving == 0)
        found = counts["start" if at_start else role]
        found[0] += 1
        found[1] += accepted
        count(role, accepted, compared=compared)

    session._trial.count = counted
    prompts = take_prompts(given.domain)
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens)
    served, began = 0, time.monotonic()
    lines: list[dict[str, Any]] = []
    trainer: Any = None
    for domain in given.order.split(","):
        for first in range(0, given.requests, given.window):
            size = min(given.window, given.requests - first)
            texts = [next(prompts[domain]) for _ in range(size)]
            chats: Any = [[{"role": "user", "content": text}] for text in texts]
            started = time.monotonic()
            answers = llm.chat(chats, params, use_tqdm=False)
            seconds = time.monotonic() - started
            num_tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            served += num_tokens
            lengths = [len(answer.outputs[0].token_ids) for answer in answers]
            line = {
                "domain": domain,
                "served": served,
                "seconds": round(time.monotonic() - began, 1),
                "version": session.state.serving,
                "accepted_a_step": {
                    name: round(total / steps, 4) for name, (steps, total) in counts.items()
                },
                "steps": {name: steps for name, (steps, _) in counts.items()},
                "tokens_a_second": round(num_tokens / seconds, 1),
                "mean_answer": round(statistics.mean(lengths), 1),
            }
            if given.train_share:
                session.flush()
                trainer = trainer or make_trainer(given.folder)
                line["train_steps"] = train_for(trainer, given.train_share * seconds)
            print(json.dumps(line), flush=True)
            lines.append(line)
            counts.clear()
    session.close()
    llm.llm_engine.engine_core.shutdown()
    if given.plot is not None:
        draw(lines, given.plot)


if __name__ == "__main__":
    main()
