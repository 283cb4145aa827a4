# SPDX-License-Identifier: Apache-2.0
"""Tokens a step of ``input_copy`` on recorded answers, by how the engine is scheduled.

    python scripts/late_tables.py record --model MODEL --prompts prompts.jsonl recorded.jsonl
    python scripts/late_tables.py replay --tokenizer MODEL recorded.jsonl

Replayed are synchronous scheduling, where a weak match drafts little; asynchronous scheduling with
drafts behind each step's tokens, all of one length; and the same with drafts looked up on the
device, from what the host knew one step before. For that the rule that the kernels are tested
against takes their place, ``proposers/input_copy/late_reference.py``. Replay knows no clock, so
``adaptive_length`` has no part in it. As a control the last one is replayed with an old query.

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

from vllm_spec_ext.cli.corpus import load_tokenizer
from vllm_spec_ext.cli.simulate import Point, make_points, read_recordings, start
from vllm_spec_ext.proposers.base import Draft, RequestStep, StepContext, StepOutcome, chain
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.copy_state import LateState
from vllm_spec_ext.proposers.input_copy.late_reference import Texts, late_draft
from vllm_spec_ext.replay import Recording, replay

DESIGNS = ("synchronous", "behind each step", "late tables", "late, old query")


@dataclass
class Design:
    """A proposer as one way of scheduling asks it."""

    proposer: InputCopy
    name: str

    def __post_init__(self) -> None:
        self.info, self.needs = self.proposer.info, self.proposer.needs
        self.options: Any = self.proposer.options

    def start(self, engine: Any) -> None:
        """It was started."""

    def propose(self, step: StepContext) -> list[Draft]:
        """Drafts of each request."""
        if self.name == "synchronous":
            return self.proposer.propose(step)
        late = [self._late(request) for request in step.requests]
        read = self.proposer.propose(replace(step, fixed_length=True))
        return read if self.name == "behind each step" else late

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """As the proposer."""
        self.proposer.observe(outcomes)

    def finish(self, request_ids: Sequence[str]) -> None:
        """As the proposer."""
        self.proposer.finish(request_ids)

    def _late(self, request: RequestStep) -> Draft:
        """From the state of one step before; the query is the end of the text, or as old."""
        known = len(request.token_ids) - len(request.new_tokens)
        copy = self.proposer.known_copy(
            replace(request, token_ids=request.token_ids[:known], new_tokens=())
        )
        memory = self.proposer.earlier_answers(request.share_group)
        end = known if self.name == "late, old query" else len(request.token_ids)
        texts = Texts(
            request.token_ids[request.num_prompt_tokens : end].tolist(),
            copy.source.tolist(),
            [] if memory is None else memory.tokens.tolist(),
        )
        folded = self.proposer._folded.tolist()
        drafted = late_draft(LateState.of(copy), texts, folded, self.options, request.room)
        return chain(drafted)


def figures(
    recordings: Sequence[Recording], point: Point, tokenizer: Any, name: str
) -> dict[str, float]:
    """Tokens a step of each design; every one starts anew."""
    found = {}
    for design in DESIGNS:
        proposer, engine = start("input_copy", point, recordings, tokenizer, name, 1)
        assert isinstance(proposer, InputCopy)
        asked: Any = Design(proposer, design)
        found[design] = replay(asked, recordings, engine).tokens_per_step
    return found


def table(by_category: dict[str, dict[str, float]], sizes: dict[str, int]) -> str:
    """Markdown."""
    lines = ["| recordings | " + " | ".join(DESIGNS) + " |", "| --- " * (len(DESIGNS) + 1) + "|"]
    for category, found in by_category.items():
        sync = found["synchronous"]
        cells = [f"{found[d]:.3f} ({100 * (found[d] / sync - 1):+.1f} %)" for d in DESIGNS[1:]]
        lines.append(f"| {category}, {sizes[category]} | {sync:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def record(model: str, prompts: Path, output: Path, max_tokens: int) -> None:
    """Greedy answers of a model without drafts."""
    from vllm import LLM, SamplingParams

    rows = [json.loads(line) for line in prompts.read_text().splitlines() if line]
    engine = LLM(model, max_model_len=2048, max_num_seqs=8, enforce_eager=True)
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
    player.add_argument("recordings", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        record(given.model, given.prompts, given.output, given.max_tokens)
        return 0
    tokenizer = load_tokenizer(given.tokenizer)
    [point] = make_points("input_copy", [{"num_speculative_tokens": given.tokens}])
    groups: dict[str, list[Recording]] = defaultdict(list)
    for recording in read_recordings(given.recordings, tokenizer):
        groups[recording.category].append(recording)
    found = {
        category: figures(recordings, point, tokenizer, given.tokenizer)
        for category, recordings in sorted(groups.items())
    }
    print(table(found, {category: len(each) for category, each in groups.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
