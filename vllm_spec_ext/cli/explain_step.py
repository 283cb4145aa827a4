# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec explain-step``: one step of one request, with what was drafted and what stood."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from vllm_spec_ext.bench import prompts
from vllm_spec_ext.bench.engine_client import EngineClient, EngineFailed
from vllm_spec_ext.bench.methods import from_settings
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.vllm_engine import Sampling
from vllm_spec_ext.cli.bench import EXIT_FAILED, demo_model, report_console
from vllm_spec_ext.cli.corpus import load_tokenizer
from vllm_spec_ext.cli.log_folder import LogFolder
from vllm_spec_ext.cli.simulate import BUDGET, make_points, parse_grid, read_recordings, start
from vllm_spec_ext.cli.step_calibration import (
    calibration,
    calibration_by_strength,
    calibration_table,
    strength_table,
)
from vllm_spec_ext.cli.written_files import check_writable, write_result
from vllm_spec_ext.draw_tree import check_tree, draw_tree, visible
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import Draft, Proposer, StepContext, StepOutcome
from vllm_spec_ext.proposers.draft_tree import agreeing_path, parents_of
from vllm_spec_ext.replay import Recording, replay
from vllm_spec_ext.whole_text import check_whole

ENGINE = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 1}
DEFAULT_PROMPT = "Write a Python class for a stack with push, pop and peek."


@dataclass(frozen=True)
class DraftStep:
    """One step that verified a draft."""

    tokens: list[int]  # [n] draft nodes
    parents: list[int]  # [n] -1 = the last verified token
    path_probs: list[float]  # [n] the proposer's estimate; empty = it gave none
    accepted: list[int]  # nodes, in order
    new_tokens: list[int]  # accepted tokens and the target's own
    context: list[int]  # the last tokens before the step
    sources: list[list[str]] = field(default_factory=list)
    """[n] models that drafted each node; empty = one source"""
    strengths: list[list[str]] = field(default_factory=list)
    """[n] how strong the evidence of each of these is; empty = all of one kind"""

    @property
    def num_segments(self) -> int:
        """Runs of nodes each of which continues the node before it."""
        return sum(parent != node - 1 or not node for node, parent in enumerate(self.parents))

    @property
    def off_first_path(self) -> int:
        """Accepted nodes that are not on the draft's first path."""
        first = 0
        while first < len(self.parents) and self.parents[first] == first - 1:
            first += 1
        return sum(node >= first for node in self.accepted)


def choose(steps: Sequence[DraftStep], number: int | None) -> int:
    """Index of the step to show.

    Args:
        steps: All steps of the request after its prefill.
        number: Counted from 1; None = the one with most accepted tokens off the first path, and
            among equals the most accepted tokens.

    Raises:
        SpecExtError: No such step, or no step drafted at all.
    """
    if number is not None:
        if not 1 <= number <= len(steps):
            raise SpecExtError(f"--step: found {number}, expected 1 to {len(steps)}")
        return number - 1
    drafted = [index for index, step in enumerate(steps) if step.tokens]
    if not drafted:
        raise SpecExtError(
            "no step of this request verified a draft; try another prompt, more --max-tokens or a "
            "lower min_confidence"
        )
    return max(drafted, key=lambda i: (steps[i].off_first_path, len(steps[i].accepted)))


class _Witness:
    """Stands between replay and a proposer, and keeps each draft with what the recording says."""

    def __init__(self, proposer: Proposer, recording: Recording) -> None:
        self.proposer = proposer
        self.info = proposer.info
        self.tokens = [*recording.prompt_token_ids, *recording.output_token_ids]
        self.steps: list[DraftStep] = []

    def propose(self, step: StepContext) -> list[Draft]:
        drafts = self.proposer.propose(step)
        for request, draft in zip(step.requests, drafts, strict=True):
            known = len(request.token_ids)
            if known == len(self.tokens):
                continue  # it is over, and read for the last time
            self.steps.append(
                verified_by(draft, self.tokens[known:], self.tokens[max(0, known - 8) : known])
            )
        return drafts

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        self.proposer.observe(outcomes)

    def finish(self, request_ids: Sequence[str]) -> None:
        self.proposer.finish(request_ids)


def verified_by(draft: Draft, recorded: Sequence[int], context: Sequence[int]) -> DraftStep:
    """What a target that says ``recorded`` makes of a draft."""
    tokens, parents = draft.tokens.tolist(), parents_of(draft)
    accepted = list(agreeing_path(tokens, parents, recorded))
    probs = [] if draft.path_probs is None else draft.path_probs.tolist()
    new = list(recorded[: len(accepted) + 1])
    sources = [list(names) for names in draft.sources or ()]
    strengths = [list(names) for names in draft.strengths or ()]
    return DraftStep(tokens, parents, probs, accepted, new, list(context), sources, strengths)


def from_engine(trace: dict[str, Any]) -> list[DraftStep]:
    """Steps after the prefill, from what the engine recorded."""
    known = list(trace["prompt"])
    steps = []
    for row in trace["steps"]:
        context = known[-8:]
        known += row["new_tokens"]
        if len(known) == len(trace["prompt"]) + len(row["new_tokens"]) and not row["tokens"]:
            continue  # the prefill
        fields = (
            *("tokens", "parents", "path_probs", "sources", "strengths"),
            *("accepted", "new_tokens"),
        )
        steps.append(DraftStep(**{name: row[name] for name in fields}, context=context))
    return steps


def rich_tree(step: DraftStep, texts: Sequence[str], root: str, bonus: str | None) -> Tree:
    """The draft as a tree for the terminal: accepted nodes green, the target's token yellow.

    Nodes stand below each other until there is a branch; a line deeper for each would soon be as
    wide as no terminal is.
    """
    check_tree(len(texts), step.parents, step.accepted)
    last = step.accepted[-1] if step.accepted else -1
    num_children = Counter([*step.parents, *([] if bonus is None else [last])])
    top = Tree(Text(visible(root), style="bold"))
    branches = [top]

    def grow(above: int, label: Text) -> Tree:
        branch = branches[above + 1]
        if above < 0 or num_children[above] > 1:
            return branch.add(label)
        assert isinstance(branch.label, Text)
        branch.label.append("\n").append_text(label)
        return branch

    for node, text in enumerate(texts):
        stands = node in step.accepted
        label = Text(visible(text), style="bold green" if stands else "")
        if step.path_probs:
            label.append(f"  {step.path_probs[node]:.3f}", style="dim")
        if step.sources:
            label.append(f"  {' + '.join(step.sources[node])}", style="cyan")
        if stands:
            label.append("  accepted", style="green")
        branches.append(grow(step.parents[node], label))
    if bonus is not None:
        grow(last, Text.assemble((visible(bonus), "bold yellow"), ("  the target's own", "yellow")))
    return top


def explain_step(
    model: Annotated[
        str | None, typer.Option(help="Target; by default the small one that is fetched.")
    ] = None,
    method: Annotated[str, typer.Option(help="Proposer.")] = "adaptive_ngram",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Option: key=value; may be repeated.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option("--prompts", help="Prompt file, or `bundled`.")
    ] = None,
    index: Annotated[int, typer.Option(min=0, help="Which prompt or recording, from 0.")] = 0,
    step: Annotated[
        int | None, typer.Option(min=1, help="Which step after the prefill, from 1.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The step with most tokens off the first path (default).")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of the answer.")] = 128,
    dtype: Annotated[str, typer.Option(help="Type of weights and activations.")] = "bfloat16",
    recordings: Annotated[
        Path | None, typer.Option("--replay", help="Recorded outputs instead of an engine.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the tree into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one greedy request and show a step: the draft, what was accepted, what it cost.

    Exit status: 0 if all went well, 1 if the engine failed, 2 on bad input.
    """
    if best and step is not None:
        raise SpecExtError("give --step or --best, not both")
    if sum(given is not None for given in (prompt, prompt_file, recordings)) > 1:
        raise SpecExtError("give one of --prompt, --prompts and --replay")
    grid = parse_grid(settings or [])
    if len(grid) != 1:
        raise SpecExtError("--set: one value for each option; grids are for `vllm-spec simulate`")
    check_writable(svg)
    if prompt is not None:  # a byte that is no UTF-8 becomes half a character (PEP 383)
        check_whole(prompt, "--prompt", "text", "remove it, or give the text in UTF-8")
    target = model or demo_model()
    if recordings is not None:
        steps = replayed(recordings, index, method, grid[0], target)
    else:
        question = _question(prompt, prompt_file, index)
        steps = run_engine(target, method, grid[0], question, max_tokens, dtype)
    number = choose(steps, step)
    tokenizer: Any = load_tokenizer(target)
    show(steps, number, method, tokenizer, svg=svg, as_json=as_json)


def _question(prompt: str | None, file: str | None, index: int) -> Question:
    if file is None:
        return Question(1, "all", ({"role": "user", "content": prompt or DEFAULT_PROMPT},))
    questions = prompts.load(file, field="prompt", template=None, limit=None)
    if index >= len(questions):
        raise SpecExtError(f"--index: found {index}, expected 0 to {len(questions) - 1}")
    return replace(questions[index], follow_ups=())  # one request is shown


def replayed(
    path: Path, index: int, method: str, given: dict[str, Any], target: str
) -> list[DraftStep]:
    """Steps of a recorded output, without an engine."""
    tokenizer = load_tokenizer(target)
    items = read_recordings(path, tokenizer)
    if index >= len(items):
        raise SpecExtError(f"--index: found {index}, expected 0 to {len(items) - 1}")
    point = make_points(method, [given])[0]
    proposer, engine = start(method, point, [items[index]], tokenizer, target, 1)
    witness: Any = _Witness(proposer, items[index])
    replay(witness, [items[index]], engine)
    return witness.steps


def run_engine(
    target: str,
    method: str,
    given: dict[str, Any],
    question: Question,
    max_tokens: int,
    dtype: str,
) -> list[DraftStep]:
    """Steps of one greedy request on a real engine, in a child process."""
    info = registry.info(method)  # a wrong name or option is refused before the engine starts
    parse_options(info.options, {k: v for k, v in given.items() if k != BUDGET}, method)
    # A fresh engine holds drafts back, and one request is soon over.
    settings = {"adaptive_length": False, **given}
    status = Console(stderr=True)
    try:
        with (
            LogFolder("step") as logs,
            status.status("starting the engine and answering"),
            EngineClient(method, logs.path / "engine.log") as engine,
        ):
            engine.start(
                target,
                from_settings(method, settings),
                {**ENGINE, "dtype": dtype},
                Sampling(max_tokens),
            )
            engine.prepare([question], 0, 1)
            trace = engine.trace(0)
    except EngineFailed as error:
        status.print(f"vllm-spec: {error}; its log: {logs.path}", markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED) from error
    return from_engine(trace)


def show(
    steps: Sequence[DraftStep],
    number: int,
    method: str,
    tokenizer: Any,
    *,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Print one step and write its pictures."""
    step = steps[number]
    texts = [tokenizer.decode([token]) for token in step.tokens]
    root = tokenizer.decode(step.context[-1:])
    bonus = None  # where a recording ends with the draft
    if len(step.new_tokens) > len(step.accepted):
        bonus = tokenizer.decode(step.new_tokens[-1:])
    summary = (
        f"step {number + 1} of {len(steps)}: {len(step.tokens)} nodes in {step.num_segments} "
        f"segments, {len(step.accepted)} accepted"
    )
    if as_json:
        fields = {
            "method": method,
            "step": number + 1,
            "num_steps": len(steps),
            "num_segments": step.num_segments,
            "texts": texts,
            "context_text": tokenizer.decode(step.context),
            "bonus_text": bonus,
            "calibration": {name: asdict(one) for name, one in calibration(steps).items()},
            "calibration_by_strength": list(map(asdict, calibration_by_strength(steps))),
            **asdict(step),
        }
        print(json.dumps(fields, indent=2))
    else:
        out = report_console()
        out.print(
            f"{method}, {summary} ({step.off_first_path} off the first path)\n"
            f"after: …{tokenizer.decode(step.context)!r}",
            markup=False,
            highlight=False,
        )
        # A line that is too long goes on in the next one, by the terminal itself.
        tree = rich_tree(step, texts, root, bonus)
        out.print(tree, crop=False, no_wrap=True, overflow="ignore", highlight=False)
        mean = sum(len(some.new_tokens) for some in steps) / len(steps)
        out.print(f"whole answer: {mean:.2f} tokens a step", highlight=False)
        by_source = calibration(steps)
        if by_source:
            here = calibration([step])
            calibration_table(method, by_source, here).print(out)
        by_strength = calibration_by_strength(steps)
        if by_strength:
            strength_table(by_strength).print(out)
    title = f"{method}, {summary}"
    if svg is not None:
        write_result(
            svg,
            draw_tree(
                texts,
                step.parents,
                step.accepted,
                title,
                root=root,
                bonus=bonus,
                probs=step.path_probs,
                sources=step.sources,
            ),
        )
