# SPDX-License-Identifier: Apache-2.0
"""Measures parts, one engine after another, and joins what was measured to one result."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_bench.parts_folder import Measured, PartsFolder
from gpu_bench.plan import Part
from vllm_spec_ext.bench.engine_client import EngineClient, EngineFailed
from vllm_spec_ext.bench.prompts import Question, digest
from vllm_spec_ext.bench.records import Run
from vllm_spec_ext.bench.session import BenchResult, sampling_of
from vllm_spec_ext.bench.settings import BenchSettings

Measure = Callable[[Part], Measured]


def measure_part(
    part: Part, settings: BenchSettings, questions: Sequence[Question], log: Path
) -> Measured:
    """Start the part's engine alone, answer everything, end it.

    Raises:
        EngineFailed: It did not start, or died.
        SpecExtError: A prompt does not fit the model.
    """
    runs = []
    arguments = {**settings.llm_args(), **part.engine_args}
    with EngineClient(part.name, log) as client:
        client.start(settings.model, part.method, arguments, sampling_of(settings), 1)
        facts = client.prepare(questions, settings.warm_up, max(settings.batch_size))
        for batch_size in settings.batch_size:
            for repeat in range(settings.repeats):
                run = client.run(range(len(questions)), batch_size)
                runs.append(Run(part.name, batch_size, repeat, run))
    return Measured(facts, runs)


def conditions_of(
    settings: BenchSettings,
    questions: Sequence[Question],
    machine: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """What parts that are put side by side must have in common; JSON-ready."""
    left_out = {"methods", "ngram_grid", "servers", "request_rate", "limit", "datasets", "prompts"}
    return {
        **settings.model_dump(mode="json", exclude=left_out),
        "questions": digest(questions),
        "versions": dict(provenance["versions"]),
        "git_sha": provenance["git_sha"],
        "gpu": machine.get("name"),
        "driver": machine.get("driver"),
    }


def measure_missing(
    parts: Sequence[Part],
    folder: PartsFolder,
    result: BenchResult,
    measure: Measure,
    say: Callable[[str], None],
) -> None:
    """Fill a result with all parts; those that are on file are not measured again.

    A part that fails is named in ``result.failures``, and tried again by the next run.

    Args:
        parts: Which.
        folder: Where they are kept.
        result: Takes facts, runs and failures.
        measure: Runs one engine.
        say: Hears of progress.

    Raises:
        SpecExtError: A file is of other conditions or damaged; nothing was measured yet.
    """
    kept = {part.name: folder.find(part.name) for part in parts}
    for part in parts:
        measured = kept[part.name]
        if measured is None:
            say(f"{part.name}: measuring")
            try:
                measured = measure(part)
            except EngineFailed as error:
                result.failures[part.name] = str(error)
                say(f"{part.name}: FAILED: {error}")
                continue
            folder.keep(part.name, measured)
        else:
            say(f"{part.name}: measured before")
        result.facts[part.name] = measured.facts
        result.runs += measured.runs
