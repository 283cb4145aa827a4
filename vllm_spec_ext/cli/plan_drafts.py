# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec plan --drafts``: which draft model is fastest, here and under other costs."""

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vllm_spec_ext.bench import provenance
from vllm_spec_ext.bench.datasets import WITHIN_DATASET
from vllm_spec_ext.bench.draft_plan import (
    Candidate,
    Drafted,
    DraftModelFacts,
    Pair,
    Prediction,
    for_pair,
    rank,
    tree_for_pair,
    tree_speed_up,
)
from vllm_spec_ext.bench.engine_client import EngineClient
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.own_process import measure_apart
from vllm_spec_ext.bench.planner import StepTimes
from vllm_spec_ext.bench.prompts import Question, digest
from vllm_spec_ext.bench.session import sampling_of
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.bench.step_probe import Shape
from vllm_spec_ext.cli.whole_table import WholeTable
from vllm_spec_ext.errors import SpecExtError

Answers = list[tuple[list[int], list[int]]]  # token ids of prompt and answer
MeasureTimes = Callable[
    [BenchSettings, Sequence[int], int, Sequence[Shape], Path], Mapping[Shape, StepTimes]
]
_SHOWN_CHAIN = 4  # of the table that compares candidates


@dataclass(frozen=True)
class DraftPlan:
    """What was measured, and what follows."""

    candidates: list[Candidate]
    times: StepTimes
    context: int
    longest: int
    pairs: tuple[Pair, ...]
    trees: tuple[tuple[int, ...], ...] = ()

    @property
    def batch_sizes(self) -> list[int]:
        """Requests in a step."""
        return sorted(self.times.table)

    def ranked(self, batch_size: int) -> list[Prediction]:
        """Candidates, the fastest first."""
        return rank(self.candidates, batch_size, self.longest, self.times)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "context": self.context,
            "step_seconds": self.times.table,
            "drafts": [
                {
                    "draft": one.name,
                    "layers": one.num_layers,
                    "parameters": one.num_parameters,
                    "right": one.coverage,
                    "acceptance_per_position": one.per_position(self.longest),
                    "tokens_per_step": {
                        chain: one.tokens_per_step(chain) for chain in range(1, self.longest + 1)
                    },
                    "forward_seconds": {b: one.forward_s(b) for b in self.batch_sizes},
                }
                for one in self.candidates
            ],
            "ranking": {b: [_row(each) for each in self.ranked(b)] for b in self.batch_sizes},
            "pairs": [
                {**dataclasses.asdict(pair), **_row(for_pair(one, pair, self.longest))}
                for pair in self.pairs
                for one in self.candidates
            ],
            "trees": [
                {
                    "draft": one.name,
                    "expansion": tree,
                    "nodes": one.num_nodes(tree),
                    "tokens_per_step": one.tokens_per_step(tree),
                    "speed_up": {b: tree_speed_up(one, tree, b, self.times) for b in sizes},
                    "pairs": {pair.name: tree_for_pair(one, tree, pair) for pair in self.pairs},
                }
                for sizes in [self.batch_sizes]
                for tree in self.trees
                for one in self.candidates
            ],
        }


def conditions(settings: BenchSettings, questions: Sequence[Question]) -> dict[str, Any]:
    """What the figures hold for, without prompts and paths, so that they can be shown."""
    facts = provenance.collect([])
    shown = ("date", "git_sha", "versions", "cpu", "cores")
    return {
        "measured": {**{name: facts[name] for name in shown}, "prompts_sha256": digest(questions)},
        "dtype": settings.dtype,
        "max_tokens": settings.max_tokens,
        "num_prompts": Counter(one.category.partition(WITHIN_DATASET)[0] for one in questions),
    }


def _row(found: Prediction) -> dict[str, Any]:
    return {
        "draft": found.candidate.name,
        "chain": found.chain,
        "tokens_per_step": found.tokens_per_step,
        "speed_up": found.speed_up,
    }


def split_names(given: Sequence[str]) -> list[tuple[str, ...]]:
    """Folders of each candidate: ``a+b`` is two drafts, unless there is a folder of that name.

    Raises:
        SpecExtError: A candidate is given twice, or a part of it is empty.
    """
    found = [
        (name,) if Path(name).exists() else tuple(part.strip() for part in name.split("+"))
        for name in given
    ]
    for name, parts in zip(given, found, strict=True):
        if not all(parts):
            raise SpecExtError(f"--drafts {name!r}: expected a folder or name, or several with +")
        if found.count(parts) > 1:
            raise SpecExtError(f"--drafts {name!r} is given twice")
    return found


def measure_drafts(
    settings: BenchSettings,
    questions: Sequence[Question],
    names: Sequence[tuple[str, ...]],
    *,
    longest: int,
    pairs: tuple[Pair, ...],
    trees: tuple[tuple[int, ...], ...] = (),
    context: int | None,
    folder: Path,
    measure_times: MeasureTimes,
    report: Callable[[str], None],
) -> DraftPlan:
    """Record the target's answers, then acceptance and latency of every draft.

    Args:
        settings: Target, prompts, batch sizes.
        questions: The prompts.
        names: Folders of the drafts of each candidate.
        longest: Most tokens of a chain.
        pairs: Other cost ratios.
        trees: Expansion trees to predict beside chains.
        context: Tokens before the timed steps; None = as in the answers.
        folder: For logs and results of the processes that measure.
        measure_times: Times steps of a model, as ``plan`` does for its methods.
        report: Receives progress lines.

    Raises:
        EngineFailed: An engine ended without a result.
        SpecExtError: A draft that does not fit the target.
    """
    report("recording the target's answers ...")
    answers = record_answers(settings, questions, folder)
    if not any(len(answer) > 1 for _, answer in answers):
        raise SpecExtError("the answers are one token long; raise --max-tokens")
    tokens = context or max(
        1, round(statistics.fmean(len(prompt) + len(answer) / 2 for prompt, answer in answers))
    )
    path = folder / "answers.json"
    whole = {"target": settings.model, "answers": answers}
    path.write_text(json.dumps(whole), encoding="utf-8")
    models: dict[str, DraftModelFacts] = {}
    wanted = list(dict.fromkeys(name for each in names for name in each))
    for name in wanted:  # all of them before any is timed: a wrong one shows in seconds
        report(f"acceptance of {name} ...")
        models[name] = measure_acceptance(name, path, settings.dtype, folder / "acceptance.json")
    untimed = [Candidate(tuple(models[name] for name in each)) for each in names]
    shapes: list[Drafted] = [longest, *trees]
    most = max(one.num_nodes(shape) for one in untimed for shape in shapes)
    sizes = sorted({0, *(2**i for i in range(most.bit_length()) if 2**i < most), most})
    report("measuring the target's steps ...")
    times = measure_times(settings, sizes, tokens, ["chain"], folder)["chain"]
    for name in wanted:
        report(f"measuring passes of {name} ...")
        own = measure_times(
            settings.model_copy(update={"model": name}), [0], tokens, ["chain"], folder
        )["chain"]
        forward = {size: own.predict(size, 0) for size in settings.batch_size}
        models[name] = dataclasses.replace(models[name], forward_s=forward)
    candidates = [Candidate(tuple(models[name] for name in each)) for each in names]
    return DraftPlan(candidates, times, tokens, longest, pairs, trees)


def record_answers(settings: BenchSettings, questions: Sequence[Question], folder: Path) -> Answers:
    """The target's greedy answers to first turns; raises EngineFailed."""
    openings = [dataclasses.replace(question, follow_ups=()) for question in questions]
    with EngineClient("plain", folder / "plain.log") as client:
        client.start(
            settings.model, Method("plain", None), settings.llm_args(), sampling_of(settings)
        )
        most = max(settings.batch_size)
        client.prepare(openings, 0, most)
        return client.answers(range(len(openings)), most)


def measure_acceptance(draft: str, answers: Path, dtype: str, path: Path) -> DraftModelFacts:
    """Right guesses of one draft, measured in a process of its own.

    Raises:
        SpecExtError: The draft cannot be loaded, or does not fit the target.
        EngineFailed: It ended without a result.
    """
    found = measure_apart(
        "vllm_spec_ext.bench.draft_acceptance",
        ["--draft", draft, "--answers", str(answers), "--dtype", dtype],
        path,
        f"the acceptance of {draft} could not be measured",
    )
    # An answer's first token comes with the prefill, before anything is drafted.
    ranks = tuple(np.array(row[1:], np.int64) for row in found["ranks"] if len(row) > 1)
    return DraftModelFacts(draft, found["num_layers"], found["num_parameters"], ranks, {})


def show(plan: DraftPlan, console: Console) -> None:
    """Print candidates, their ranking at each batch size, and what other pairs would gain."""
    sizes = plan.batch_sizes
    rows = [
        [
            one.name,
            str(one.num_layers),
            f"{one.num_parameters / 1e6:.1f}M",
            f"{one.coverage:.3f}",
            f"{one.tokens_per_step(min(_SHOWN_CHAIN, plan.longest)):.2f}",
            *(f"{one.forward_s(size) * 1e3:.1f}" for size in sizes),
        ]
        for one in plan.candidates
    ]
    chain = min(_SHOWN_CHAIN, plan.longest)
    headings = ["draft", "layers", "parameters", "right", f"tokens/step, chain {chain}"]
    headings += [f"ms a pass, batch {size}" for size in sizes]
    WholeTable(headings, rows, "draft models").print(console)
    for size in sizes:
        rows = [
            [
                str(place),
                found.candidate.name,
                str(found.chain),
                f"{found.tokens_per_step:.2f}",
                f"{found.speed_up:.2f}x",
            ]
            for place, found in enumerate(plan.ranked(size), start=1)
        ]
        plain = plan.times.predict(size, 0) * 1e3
        title = (
            f"by expected speed over plain decoding's, batch {size} (a plain step after "
            f"{plan.context} tokens takes {plain:.1f} ms)"
        )
        WholeTable(["", "draft", "best chain", "tokens/step", "decoding"], rows, title, 2).print(
            console
        )
    rows = [
        [one.name]
        + [
            f"{found.speed_up:.2f}x ({found.chain})"
            for found in (for_pair(one, pair, plan.longest) for pair in plan.pairs)
        ]
        for one in plan.candidates
    ]
    headings = ["draft", *(f"{pair.name} ({pair.ratio:.3f})" for pair in plan.pairs)]
    title = (
        "the same acceptance under other costs (a draft's pass over a plain step): decoding, and "
        "the best chain"
    )
    WholeTable(headings, rows, title).print(console)
    if not plan.trees:
        return
    rows = [
        [
            one.name,
            " ".join(map(str, tree)),
            str(one.num_nodes(tree)),
            f"{one.tokens_per_step(tree):.2f}",
            *(f"{tree_speed_up(one, tree, size, plan.times):.2f}x" for size in sizes),
            *(f"{tree_for_pair(one, tree, pair):.2f}x" for pair in plan.pairs),
        ]
        for tree in plan.trees
        for one in plan.candidates
    ]
    headings = ["draft", "children by step", "nodes", "tokens/step"]
    headings += [f"decoding, batch {size}" for size in sizes] + [pair.name for pair in plan.pairs]
    WholeTable(headings, rows, "expansion trees: decoding, here and under those costs", 2).print(
        console
    )
