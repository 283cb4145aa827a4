# SPDX-License-Identifier: Apache-2.0
"""Measures one drafter: an engine that drafts with it in every step, and trials outside of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_spec_ext.bench.drafter_check import FirstToken, Measured, Trials
from vllm_spec_ext.bench.drafter_parts import Part
from vllm_spec_ext.bench.engine_client import EngineClient, EngineFailed
from vllm_spec_ext.bench.own_process import measure_apart
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.records import TurnRecord
from vllm_spec_ext.bench.session import sampling_of
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.errors import SpecExtError

TRIED = ("heads", "block", "draft_model")  # kinds that are known outside the engine


class RefusedError(SpecExtError):
    """The drafter's files do not fit the target; found before any engine ran."""


def measure(
    part: Part,
    settings: BenchSettings,
    questions: Sequence[Question],
    log: Path,
    report: Callable[[str], None],
) -> Measured:
    """Answer the first turns, one request at a time, drafting in every step.

    Args:
        part: What drafts.
        settings: Target and engine.
        questions: The prompts.
        log: For the engine's output.
        report: Receives progress lines.

    Raises:
        RefusedError: The configuration is refused: checkpoint and target do not fit.
        EngineFailed: The engine could not be started, or died.
    """
    openings = [replace(question, follow_ups=()) for question in questions]
    with EngineClient(part.method.name, log) as client:
        arguments = settings.llm_args()
        report(f"checking the files of {part.model} ...")
        try:
            client.check(settings.model, part.method, arguments)
        except EngineFailed:
            raise
        except SpecExtError as error:
            raise RefusedError(str(error)) from error
        report("starting an engine that drafts in every step ...")
        client.start(settings.model, part.method, arguments, sampling_of(settings))
        client.prepare(openings, 0, 1)
        report(f"answering {len(openings)} prompts ...")
        everything = range(len(openings))
        if part.method.ours:
            return of_traces([client.trace(index) for index in everything])
        run = client.run(everything, 1)
        turns = [record.turns[0] for record in run.questions]
        return of_turns(turns, [prompt for prompt, _ in client.answers(everything, 1)])


def of_traces(traces: Sequence[Mapping[str, Any]]) -> Measured:
    """From what our worker recorded; see ``EngineServer.trace``.

    Answers without room for a draft are left out.

    Raises:
        SpecExtError: Nothing is left.
    """
    traces = [trace for trace in traces if len(trace["output"]) > 2]
    if not traces:
        raise SpecExtError(
            "no answer is longer than two tokens, so nothing was drafted; give prompts with longer "
            "answers (--prompts), or raise --max-tokens"
        )
    firsts, silent = [], 0
    for number, trace in enumerate(traces):
        place = 0
        for step in trace["steps"]:
            drafted, new = step["tokens"], step["new_tokens"]
            if drafted:
                firsts.append(FirstToken(number, place, drafted[0] == new[0], drafted[0]))
            elif 0 < place < len(trace["output"]) - 1:  # none before the first, nor for the last
                silent += 1
            place += len(new)
    answers = tuple((list(trace["prompt"]), list(trace["output"])) for trace in traces)
    return Measured(answers, tuple(firsts), silent)


def of_turns(turns: Sequence[TurnRecord], prompts: Sequence[Sequence[int]]) -> Measured:
    """From the sizes of an engine's steps, of a method that drafts in each of them.

    A step that gives two tokens or more accepted the first one of its draft. The last step of an
    answer is left out, as it ends early.
    """
    firsts = []
    for number, turn in enumerate(turns):
        place = 0
        for index, size in enumerate(turn.step_sizes[:-1]):
            if index:
                firsts.append(FirstToken(number, place, size > 1))
            place += size
    answers = tuple(
        (list(prompt), list(turn.token_ids)) for prompt, turn in zip(prompts, turns, strict=True)
    )
    return Measured(answers, tuple(firsts))


def run_trials(part: Part, settings: BenchSettings, measured: Measured, folder: Path) -> Trials:
    """What the drafter drafts for these answers outside the engine, in a process of its own.

    Raises:
        SpecExtError: Target or drafter cannot be loaded there.
        EngineFailed: The process ended without a result.
    """
    answers, path = folder / "answers.json", folder / "trials.json"
    given = {
        "target": settings.model,
        "model": part.model,
        "kind": part.kind,
        "dtype": settings.dtype,
        "answers": measured.answers,
    }
    answers.write_text(json.dumps(given), encoding="utf-8")
    found = measure_apart(
        "vllm_spec_ext.bench.drafter_trials",
        ["--answers", str(answers)],
        path,
        f"{part.model} could not be run outside the engine",
    )
    return Trials.read(found)
