# SPDX-License-Identifier: Apache-2.0
"""From runs to figures, after the rules of Spec-Bench where it has one.

Tokens per step are a micro mean over all target steps. Speed at batch 1 is, as in Spec-Bench, the
unweighted mean over questions of tokens/time with prefill inside; at larger batches it is all
tokens over the wall time of the pass. A speed-up compares means, within one repeat.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vllm_spec_ext.bench.prompts import WITHIN_DATASET
from vllm_spec_ext.bench.records import EngineCounters, EngineRun, QuestionRecord, Run
from vllm_spec_ext.bench.windows import slowest_window

_Figure = TypeVar("_Figure")
# A method's answers to some questions in one repeat, and plain decoding's.
_Answered = tuple[Sequence[QuestionRecord], Sequence[QuestionRecord]]


@dataclass(frozen=True)
class Spread:
    """A figure over the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Median, minimum and maximum of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Divergence:
    """An answer that is not plain decoding's."""

    repeat: int
    question: int
    num_expected: int  # tokens of plain decoding's answer
    num_found: int
    first: int  # index of the first token that differs (or is missing)


@dataclass(frozen=True)
class Summary:
    """One method at one batch size."""

    method: str
    batch_size: int
    tokens_per_step: float  # decode steps only: the prefill's step and token left out
    tokens_per_step_with_prefill: float
    tokens_per_step_by_category: dict[str, float]
    tok_s: Spread
    decode_speed_up: Spread | None  # in token_ms; None: no plain run to compare with
    token_ms: Spread  # between a request's tokens, steps beside another one's prefill left out
    gap_p50_ms: float | None  # between a request's outputs, as its user sees them
    gap_p99_ms: float | None
    first_token_ms: Spread
    speed_up: Spread | None  # None: no plain run to compare with
    speed_up_by_category: dict[str, float] | None  # batch 1 only
    counters: EngineCounters
    acceptance_per_position: list[float]  # accepted at this position / drafts, as vLLM counts
    draft_length: float | None  # mean over drafts
    acceptance_rate: float | None  # accepted / drafted tokens
    propose_p50_us: float | None
    propose_p99_us: float | None
    rss_mib: float
    num_compared: int
    num_identical: int
    divergences: list[Divergence]
    num_expecting: int = 0  # answers to questions that say what a right one holds
    num_right: int = 0
    slowest: float | None = None  # lowest speed-up over any 200 decoding steps
    slowest_by_category: dict[str, float] | None = None  # the same of each category for itself


def tokens_per_step(records: Iterable[QuestionRecord], *, prefill: bool) -> float:
    """Mean tokens per target step; ``nan`` if there was no such step.

    Args:
        records: The questions to average over.
        prefill: Count the step that ends the prefill, which always gives one token.
    """
    first = 0 if prefill else 1
    steps = [
        size for record in records for turn in record.turns for size in turn.step_sizes[first:]
    ]
    return sum(steps) / len(steps) if steps else float("nan")


def tokens_per_second(run: EngineRun, batch_size: int) -> float:
    """Speed of a pass, prefill included."""
    if batch_size == 1:
        return _mean(record.num_tokens / record.wall_s for record in run.questions)
    return sum(record.num_tokens for record in run.questions) / run.wall_s


def seconds_per_token(run: EngineRun) -> float:
    """Mean over questions of the time a token took after the first output; 0 if there is none."""
    return _mean(_decoding(run).values())


def _decoding(run: EngineRun) -> dict[int, float]:
    """Seconds a token in the decoding steps of each question that has some, by its index."""
    found = {}
    for record in run.questions:
        steps = [(turn, step) for turn in record.turns for step in turn.decode_steps]
        tokens = sum(turn.step_sizes[step] for turn, step in steps)
        if tokens:
            found[record.index] = sum(turn.step_s[step] for turn, step in steps) / tokens
    return found


def compare(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first difference; ``None`` if both are identical, in length too."""
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = -int(-share * len(ordered) // 1)  # ceiling
    return ordered[max(rank, 1) - 1]


def summarise(runs: Sequence[Run], plain: str | None) -> list[Summary]:
    """One summary for each method and batch size, in order of first appearance.

    Args:
        runs: All runs of a benchmark.
        plain: Name of the method that decodes plainly, ``None`` if it did not run.
    """
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.method, run.batch_size), []).append(run)
    baselines = {(run.batch_size, run.repeat): run for run in runs if run.method == plain}
    return [_summarise(group, baselines) for group in groups.values()]


def _summarise(group: Sequence[Run], baselines: dict[tuple[int, int], Run]) -> Summary:
    batch_size = group[0].batch_size
    questions = [record for run in group for record in run.result.questions]
    pairs = [
        (run, baselines[run.batch_size, run.repeat])
        for run in group
        if (run.batch_size, run.repeat) in baselines
    ]
    if group[0] in baselines.values():
        # Plain decoding against its own first repeat: shows how much the engine itself wavers.
        pairs = [(run, group[0]) for run in group]
    answered = [
        (run.result.questions, base.result.questions)
        for run, base in pairs
        if run.method != base.method
    ]
    divergences = [found for run, base in pairs for found in _divergences(run, base)]
    compared = sum(len(run.result.questions) for run, _ in pairs)
    counters = sum((run.result.counters for run in group), EngineCounters())
    times = [us for run in group for us in run.result.propose_us or ()]
    gaps = [1e3 * gap for one in questions for turn in one.turns for gap in turn.step_s[1:]]
    return Summary(
        method=group[0].method,
        batch_size=batch_size,
        tokens_per_step=tokens_per_step(questions, prefill=False),
        tokens_per_step_with_prefill=tokens_per_step(questions, prefill=True),
        tokens_per_step_by_category=_by_category(
            questions, lambda part: tokens_per_step(part, prefill=False)
        ),
        tok_s=Spread.of([tokens_per_second(run.result, batch_size) for run in group]),
        token_ms=Spread.of([1000 * seconds_per_token(run.result) for run in group]),
        gap_p50_ms=percentile(gaps, 0.5) if gaps else None,
        gap_p99_ms=percentile(gaps, 0.99) if gaps else None,
        decode_speed_up=_decode_speed_up(group, baselines),
        first_token_ms=Spread.of([_first_token_ms(run.result) for run in group]),
        speed_up=_speed_up(group, baselines),
        speed_up_by_category=_category_speed_ups(group, baselines) if batch_size == 1 else None,
        counters=counters,
        acceptance_per_position=[
            count / counters.num_drafts
            for count in counters.accepted_per_position
            if counters.num_drafts
        ],
        draft_length=_ratio(counters.num_draft_tokens, counters.num_drafts),
        acceptance_rate=_ratio(counters.num_accepted_tokens, counters.num_draft_tokens),
        propose_p50_us=percentile(times, 0.5) if times else None,
        propose_p99_us=percentile(times, 0.99) if times else None,
        rss_mib=max(run.result.rss_bytes for run in group) / 2**20,
        num_compared=compared,
        num_identical=compared - len(divergences),
        divergences=divergences,
        num_expecting=sum(record.right is not None for record in questions),
        num_right=sum(record.right is True for record in questions),
        slowest=_slowest(answered, batch_size),
        slowest_by_category=_slowest_by_category(answered, batch_size),
    )


def _slowest(answered: Sequence[_Answered], batch_size: int) -> float | None:
    """In any repeat; ``None`` for plain decoding itself, which is not among them."""
    found = [slowest_window(own, plain, batch_size) for own, plain in answered]
    return min((value for value in found if value is not None), default=None)


def _slowest_by_category(answered: Sequence[_Answered], batch_size: int) -> dict[str, float] | None:
    """The same of each; one of fewer steps counts as a whole."""
    parts: dict[str, list[_Answered]] = {}
    for own, plain in answered:
        theirs = _by_category(plain, list)
        for name, part in _by_category(own, list).items():
            parts.setdefault(name, []).append((part, theirs[name]))
    found = {name: _slowest(part, batch_size) for name, part in parts.items()}
    return {name: value for name, value in found.items() if value is not None} or None


def _speed_up(group: Sequence[Run], baselines: dict[tuple[int, int], Run]) -> Spread | None:
    ratios = []
    for run in group:
        base = baselines.get((run.batch_size, run.repeat))
        if base is not None:
            own = tokens_per_second(run.result, run.batch_size)
            ratios.append(own / tokens_per_second(base.result, run.batch_size))
    return Spread.of(ratios) if ratios else None


def _decode_speed_up(group: Sequence[Run], baselines: dict[tuple[int, int], Run]) -> Spread | None:
    """Over the questions that both have decoding steps of; ``None`` without one."""
    ratios = []
    for run in group:
        base = baselines.get((run.batch_size, run.repeat))
        own, plain = _decoding(run.result), _decoding(base.result) if base else {}
        both = own.keys() & plain.keys()
        seconds = sum(own[index] for index in both)
        if seconds:
            ratios.append(sum(plain[index] for index in both) / seconds)
    return Spread.of(ratios) if ratios else None


def _category_speed_ups(
    group: Sequence[Run], baselines: dict[tuple[int, int], Run]
) -> dict[str, float] | None:
    def speeds(part: Sequence[QuestionRecord]) -> float:
        return _mean(record.num_tokens / record.wall_s for record in part)

    ratios: dict[str, list[float]] = {}
    for run in group:
        base = baselines.get((run.batch_size, run.repeat))
        if base is None:
            return None
        reference = _by_category(base.result.questions, speeds)
        for name, speed in _by_category(run.result.questions, speeds).items():
            ratios.setdefault(name, []).append(speed / reference[name])
    return {name: statistics.median(values) for name, values in ratios.items()}


def _divergences(run: Run, base: Run) -> list[Divergence]:
    found = []
    for own, plain in zip(run.result.questions, base.result.questions, strict=True):
        first = compare(plain.token_ids, own.token_ids)
        if first is not None:
            found.append(Divergence(run.repeat, own.index, plain.num_tokens, own.num_tokens, first))
    return found


def _by_category(
    records: Sequence[QuestionRecord], figure: Callable[[Sequence[QuestionRecord]], _Figure]
) -> dict[str, _Figure]:
    parts: dict[str, list[QuestionRecord]] = {}
    for record in records:
        dataset, within, _ = record.category.partition(WITHIN_DATASET)
        parts.setdefault(record.category, []).append(record)
        if within:
            parts.setdefault(dataset, []).append(record)
    return {name: figure(part) for name, part in sorted(parts.items())}


def _first_token_ms(run: EngineRun) -> float:
    return 1000 * statistics.median(
        turn.first_token_s for record in run.questions for turn in record.turns
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _ratio(above: int, below: int) -> float | None:
    return above / below if below else None
