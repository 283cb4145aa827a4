# SPDX-License-Identifier: Apache-2.0
"""What a drafter has to learn from some requests: trained on them, judged on later ones.

    python scripts/online_gains.py MODEL DRAFTER FOLDER --method nar --draft-tokens 6 \
        --domain maths=gsm8k.jsonl:question --domain chat=instructions.jsonl:prompt \
        --setting 3e-5,128,200 --setting "3e-5,128,200,maths>chat"

One engine answers `--requests` prompts of each domain, greedily, and records them. From the weights
of the start a student is trained for each `--setting` (learning rate, batch size, steps), as the
trainer does. Then the same engine answers the next `--judge` prompts of each domain with each of
the results, and with the weights of the start. A line of JSON is printed for each.

A setting may end with what is learned from: ``maths``, ``maths+chat`` (the default: all), or in
which order it comes: with ``maths>chat`` that many steps on mathematics, and as many when chat has
come, too.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Before vLLM is imported: the engine in this process, where its session can be read.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from online_acceptance import add_engine_arguments, start_engine, take_prompts


def train(
    recorded: Path,
    shards_of: Mapping[str, Sequence[Path]],
    student: Any,
    setting: str,
    folder: Path,
) -> tuple[Path, dict[str, Any]]:
    """A student of its own on the samples of a folder.

    Args:
        recorded: The folder.
        shards_of: Its samples, by domain.
        student: Of its method; starts with the weights of the start.
        setting: Learning rate, batch size, steps, and of what.
        folder: Where the result goes.

    Returns:
        Folder of the trained weights, and figures.
    """
    from vllm_spec_ext.online.folder import SAMPLES, FolderFacts, read_record
    from vllm_spec_ext.online.trainer import Trainer
    from vllm_spec_ext.online.versions import version_folder, write_version

    rate, batch, steps, *order = setting.split(",")
    shutil.copytree(recorded, folder, ignore=shutil.ignore_patterns(SAMPLES))
    (folder / SAMPLES).mkdir()
    facts = read_record(folder, FolderFacts)
    assert facts is not None
    changes = {"learning_rate": float(rate), "batch_size": int(batch), "passes": 1e6}
    options = facts.options.model_copy(update={**changes, "publish_steps": 10**9})
    trainer = Trainer(folder, student, facts.model_copy(update={"options": options}))
    started = time.monotonic()
    for stage in (order or ["+".join(shards_of)])[0].split(">"):
        for domain in stage.split("+"):
            for shard in shards_of[domain]:
                shutil.copy(shard, folder / SAMPLES)
        for _ in range(int(steps)):
            why = trainer.advance()
            assert not why, why
    with trainer._in_place(trainer._average):
        write_version(folder, 1, student.files(), facts.drafter)
    passes = trainer._positions_trained / trainer.pool.num_positions
    figures = {"passes": round(passes, 1), "seconds": round(time.monotonic() - started, 1)}
    return version_folder(folder, 1), {**figures, "loss": round(trainer.figures["loss"], 4)}


def accepted_a_step(llm: Any, session: Any, chats: list[Any], params: Any) -> float:
    """Draft tokens accepted in a request's step, of all steps behind a prompt."""
    counts = [0, 0]

    def counted(role: str, accepted: int, **_: bool) -> None:
        counts[0] += 1
        counts[1] += accepted

    count, session._trial.count = session._trial.count, counted
    llm.chat(chats, params, use_tqdm=False)
    session._trial.count = count
    return counts[1] / counts[0]


def parse_arguments() -> argparse.Namespace:
    """What is learned from, how, and on what it is judged."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_engine_arguments(parser)
    parser.add_argument("--setting", action="append", default=[], help="RATE,BATCH,STEPS[,OF_WHAT]")
    parser.add_argument("--requests", type=int, default=160, help="of each domain")
    parser.add_argument("--judge", type=int, default=40, help="later ones of each domain")
    parser.add_argument("--tokens", type=int, default=64, help="most of an answer")
    return parser.parse_args()


def main() -> None:
    """Record, train, judge."""
    given = parse_arguments()
    import torch
    from vllm import SamplingParams

    from vllm_spec_ext.online.folder import SAMPLES, FolderFacts, read_record
    from vllm_spec_ext.online.sample_files import shards
    from vllm_spec_ext.online.student import make_student

    recorded = given.folder / "recorded"
    options = {"folder": str(recorded), "others": 1.0, "guard": 0.0, "budget": 0.0}
    llm, session = start_engine(given, options)
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens)
    prompts = take_prompts(given.domain)

    def next_chats(domain: str, count: int) -> list[Any]:
        return [[{"role": "user", "content": next(prompts[domain])}] for _ in range(count)]

    shards_of: dict[str, list[Path]] = {}
    for domain in prompts:
        asked = next_chats(domain, given.requests)
        start = accepted_a_step(llm, session, asked, params)
        print(json.dumps({"recorded": domain, "accepted_a_step": round(start, 4)}), flush=True)
        session.flush()
        known = [path for paths in shards_of.values() for path in paths]
        shards_of[domain] = [path for path in shards(recorded / SAMPLES) if path not in known]
    later = {domain: next_chats(domain, given.judge) for domain in prompts}
    session.tap = None  # what comes later is not recorded
    facts = read_record(recorded, FolderFacts)
    assert facts is not None
    student = make_student(facts, torch.device("cpu"))
    results: dict[str, tuple[Path, dict[str, Any]]] = {"": (session._origin.folder, {})}
    for place, setting in enumerate(given.setting):
        folder = given.folder / f"trained{place}"
        results[setting] = train(recorded, shards_of, student, setting, folder)
        print(json.dumps({"trained": setting, **results[setting][1]}), flush=True)
    for setting, (folder, figures) in results.items():
        session._learner.use_weights(session._learner.read_weights(folder))
        found = {
            domain: round(accepted_a_step(llm, session, chats, params), 4)
            for domain, chats in later.items()
        }
        told = {"setting": setting or "start", "accepted_a_step": found, **figures}
        print(json.dumps(told), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
