# SPDX-License-Identifier: Apache-2.0
"""Tokens a step of a method that drafts late on recorded answers, by the scheduling.

    python scripts/late_tables.py record --model MODEL --prompts prompts.jsonl recorded.jsonl
    python scripts/late_tables.py replay --tokenizer MODEL recorded.jsonl
    python scripts/late_tables.py replay --tokenizer MODEL --method adaptive_ngram recorded.jsonl
    python scripts/late_tables.py replay --tokenizer MODEL --method auto \\
        --options '{"corpus": "FOLDER"}' recorded.jsonl

Replayed are synchronous scheduling, where a weak match drafts little; asynchronous scheduling with
drafts behind each step's tokens, all of one length; and the same with drafts looked up on the
device, from what the host knew one step before. For that the host's version that the kernels are
tested against takes their place: ``proposers/input_copy/late_reference.py``, and what
``adaptive_ngram`` itself says that a device drafted. Replay knows no clock, so
``adaptive_length`` has no part in it. As a control the last one is replayed with an old query.
``auto`` drafts trees where it waits, and chains where it does not: both are replayed.

Prompts are JSON lines with ``category`` and ``prompt``, a user's message.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm_spec_ext.cli.corpus import load_tokenizer
from vllm_spec_ext.cli.simulate import Point, make_points, read_recordings, start
from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram
from vllm_spec_ext.proposers.auto import Auto
from vllm_spec_ext.proposers.auto.late_auto import LateAuto
from vllm_spec_ext.proposers.base import (
    BaseProposer,
    Draft,
    RequestStep,
    StepContext,
    StepOutcome,
    chain,
)
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.copy_state import LateState
from vllm_spec_ext.proposers.input_copy.late_reference import Texts, late_draft
from vllm_spec_ext.replay import Recording, replay

METHODS: dict[str, dict[str, Any]] = {
    "input_copy": {},
    "adaptive_ngram": {"tree": False},
    "auto": {"adaptive_length": False},
}
"""With the options that let them draft late."""
DESIGNS = ("synchronous", "behind each step", "late tables", "late, old query")
AUTO_DESIGNS = ("synchronous", "late tables")


class LateCopies:
    """What ``input_copy`` drafts late."""

    def __init__(self, proposer: InputCopy) -> None:
        """It was started."""
        self._proposer = proposer

    def draft(self, request: RequestStep, known: RequestStep, old_query: bool) -> Draft:
        """From the state of one step before; the query is the end of the text, or as old."""
        copy = self._proposer.known_copy(known)
        memory = self._proposer.earlier_answers(request.share_group)
        end = len((known if old_query else request).token_ids)
        texts = Texts(
            request.token_ids[request.num_prompt_tokens : end].tolist(),
            copy.source.tolist(),
            [] if memory is None else memory.tokens.tolist(),
            copy.heading.tolist(),
        )
        folded = self._proposer._folded.tolist()
        options = self._proposer.options
        return chain(late_draft(LateState.of(copy), texts, folded, options, request.room))


class LateNgrams:
    """What ``adaptive_ngram`` drafts late."""

    def __init__(self, proposer: AdaptiveNgram) -> None:
        """It was started."""
        self._drafter = proposer.drafter

    def draft(self, request: RequestStep, known: RequestStep, old_query: bool) -> Draft:
        """From what was learned one step before."""
        self._drafter.learn_known([known])
        query = replace(known if old_query else request, new_tokens=(), room=request.room)
        [draft] = self._drafter.drafts_behind(StepContext([query], fixed_length=True))
        return draft


def late_of(proposer: BaseProposer) -> LateCopies | LateNgrams:
    """The late part of a method."""
    if isinstance(proposer, InputCopy):
        return LateCopies(proposer)
    assert isinstance(proposer, AdaptiveNgram)
    return LateNgrams(proposer)


@dataclass
class Design:
    """A proposer as one way of scheduling asks it."""

    proposer: BaseProposer
    name: str

    def __post_init__(self) -> None:
        self.info, self.needs = self.proposer.info, self.proposer.needs
        self.options: Any = self.proposer.options
        self._late = late_of(self.proposer)

    def start(self, engine: Any) -> None:
        """It was started."""

    def propose(self, step: StepContext) -> list[Draft]:
        """Drafts of each request."""
        if self.name == "synchronous":
            return self.proposer.propose(step)
        fixed = replace(step, fixed_length=True)
        if self.name == "behind each step":
            return self.proposer.propose(fixed)
        late = []
        for request in step.requests:
            num_known = len(request.token_ids) - len(request.new_tokens)
            known = replace(request, token_ids=request.token_ids[:num_known], new_tokens=())
            late.append(self._late.draft(request, known, self.name == "late, old query"))
        self.proposer.propose(fixed)
        return late

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """What became of drafts bears on their length alone, and late ones have all of it."""
        if self.name in ("synchronous", "behind each step"):
            self.proposer.observe(outcomes)

    def finish(self, request_ids: Sequence[str]) -> None:
        """As the proposer."""
        self.proposer.finish(request_ids)


class AsDevice:
    """``auto`` as a device drafts for it."""

    def __init__(self, proposer: Auto, late: LateAuto) -> None:
        """From now on the proposer says what it drafts."""
        late.start(torch.device("cpu"))
        self._proposer, self._late = proposer, late
        self.info, self.needs, self.options = proposer.info, proposer.needs, proposer.options
        self.observe = proposer.observe

    def propose(self, step: StepContext) -> list[Draft]:
        """All drafts have their full length."""
        return self._proposer.propose(replace(step, fixed_length=True))

    def finish(self, request_ids: Sequence[str]) -> None:
        """A device is asked for each step: from the next one on it has the answers."""
        self._proposer.finish(request_ids)
        self._late.copies.keep_answers()


def figures(
    method: str, recordings: Sequence[Recording], point: Point, tokenizer: Any, name: str
) -> dict[str, float]:
    """Tokens a step of each design; every one starts anew."""
    found = {}
    for design in DESIGNS if method != "auto" else AUTO_DESIGNS:
        asked: Any
        asked, engine = start(method, point, recordings, tokenizer, name, 1)
        if method != "auto":
            asked = Design(asked, design)
        elif design != "synchronous":
            late = asked.late_drafter(engine)
            if isinstance(late, str):
                raise SystemExit(f"auto with these options drafts nothing late: {late}")
            asked = AsDevice(asked, late)
        found[design] = replay(asked, recordings, engine).tokens_per_step
    return found


def table(by_category: dict[str, dict[str, float]], sizes: dict[str, int]) -> str:
    """Markdown."""
    designs = list(next(iter(by_category.values())))
    lines = ["| recordings | " + " | ".join(designs) + " |", "| --- " * (len(designs) + 1) + "|"]
    for category, found in by_category.items():
        sync = found["synchronous"]
        cells = [f"{found[d]:.3f} ({100 * (found[d] / sync - 1):+.1f} %)" for d in designs[1:]]
        lines.append(f"| {category}, {sizes[category]} | {sync:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def record(model: str, prompts: Path, output: Path, max_tokens: int) -> None:
    """Greedy answers of a model without drafts."""
    from vllm import LLM, SamplingParams

    rows = [json.loads(line) for line in prompts.read_text().splitlines() if line]
    sizes: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 8}
    # Half of the memory is plenty for so few; all of it may not be free.
    engine = LLM(model, **sizes, enforce_eager=True, gpu_memory_utilization=0.5)
    messages = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with output.open("w") as file:
        for row, answer in zip(rows, engine.chat(messages, params), strict=True):
            ids = {
                "prompt_token_ids": list(answer.prompt_token_ids or ()),
                "output_token_ids": list(answer.outputs[0].token_ids),
            }
            facts = {"category": row.get("category", ""), "max_tokens": max_tokens}
            file.write(json.dumps({**facts, **ids}) + "\n")


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("--model", required=True)
    recorder.add_argument("--prompts", type=Path, required=True)
    recorder.add_argument("--max-tokens", type=int, default=160)
    recorder.add_argument("output", type=Path)
    player = commands.add_parser("replay")
    player.add_argument("--tokenizer", required=True)
    player.add_argument("--tokens", type=int, default=8, help="num_speculative_tokens")
    player.add_argument("--method", choices=METHODS, default="input_copy")
    player.add_argument("--options", type=json.loads, default={}, help="of the method; JSON")
    player.add_argument("recordings", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        record(given.model, given.prompts, given.output, given.max_tokens)
        return 0
    tokenizer = load_tokenizer(given.tokenizer)
    options = {
        **METHODS[given.method],
        **given.options,
        "num_speculative_tokens": given.tokens,
    }
    [point] = make_points(given.method, [options])
    groups: dict[str, list[Recording]] = defaultdict(list)
    for recording in read_recordings(given.recordings, tokenizer):
        groups[recording.category].append(recording)
    found = {
        category: figures(given.method, recordings, point, tokenizer, given.tokenizer)
        for category, recordings in sorted(groups.items())
    }
    print(table(found, {category: len(each) for category, each in groups.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
