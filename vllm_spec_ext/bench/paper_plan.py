# SPDX-License-Identifier: Apache-2.0
"""Cascades on a GPU on paper: steps, speed-up, the best draft lengths, and from where they pay.

It puts :mod:`.cascade_plan` (tokens and rounds from acceptance) and :mod:`.gpu_costs` (seconds of
a pass) together. With launch costs fitted to TriForce's program (Sun et al. 2024) it predicts the
rows of that paper's tables within 15 % from their published acceptance
(``tests/unit/bench/test_bench_paper_plan.py``).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_spec_ext.bench.cascade_plan import Drafter, InTurn, Lookup, Model, Step, step_of
from vllm_spec_ext.bench.draft_levels import LOOKUP, Cascade, Level
from vllm_spec_ext.bench.gpu_costs import Gpu
from vllm_spec_ext.bench.model_shape import ModelShape

MOST_TOKENS = 16
MOST_INNER = 4  # tokens that an inner level drafts at a time; longer chunks are rarely accepted
SHORTEST, LONGEST = 256, 1 << 20  # contexts between which a break-even is looked for
_STEPS_TO_BREAK_EVEN = 8  # of a bisection between two powers of two: 0.4 %


@dataclass(frozen=True)
class Machine:
    """Where all this is to run."""

    gpu: Gpu
    target: ModelShape
    eager_drafts: bool = False
    """Only the target's own passes are CUDA graphs."""

    def plain_s(self, batch_size: int, context: int) -> float:
        """A step of plain decoding."""
        return self.target_s(batch_size, batch_size, context)

    def target_s(self, rows: int, batch_size: int, context: int) -> float:
        """A pass of the target over all of its KV."""
        return self.gpu.forward_s(self.target, rows, batch_size, context)

    def level_s(self, level: Level, rows: int, batch_size: int, context: int) -> float:
        """A pass of a level that is a model."""
        gpu = self.gpu.eager() if self.eager_drafts else self.gpu
        seen = context if level.budget is None else min(level.budget, context)
        return gpu.forward_s(level.shape or self.target, rows, batch_size, seen)

    def choosing_s(self, cascade: Cascade, batch_size: int, context: int) -> float:
        """Reading a mean key of each page, of every view, once a step."""
        return sum(
            self.gpu.reading_s(self.page_means(level, context)) * batch_size
            for level in cascade.levels
            if level.budget is not None and context > level.budget
        )

    def page_means(self, level: Level, context: int) -> float:
        """Bytes of one request's mean keys (K is half of the KV cache)."""
        return context * self.target.kv_bytes / 2 / level.page if level.page else 0.0

    def memory_bytes(self, cascade: Cascade | None, batch_size: int, context: int) -> float:
        """Weights, KV cache and page means."""
        total = self.target.memory_bytes + batch_size * context * self.target.kv_bytes
        models: dict[str, float] = {}
        for level in cascade.levels if cascade else ():
            if level.shape is not None:
                models[level.shape.name] = level.shape.memory_bytes
                seen = context if level.budget is None else min(level.budget, context)
                total += batch_size * seen * level.shape.kv_bytes
            total += batch_size * self.page_means(level, context)
        return total + sum(models.values())

    def fits(self, cascade: Cascade | None, batch_size: int, context: int) -> bool:
        """Whether it has the memory."""
        return self.memory_bytes(cascade, batch_size, context) <= self.gpu.memory_bytes


@dataclass(frozen=True)
class Predicted:
    """A cascade at one batch size and context, with the draft lengths that are fastest there."""

    cascade: Cascade
    batch_size: int
    context: int
    plain_s: float
    step: Step
    lengths: tuple[int, ...]  # tokens that each level drafts for the one above it

    @property
    def speed_up(self) -> float:
        """Decoding speed over plain decoding's."""
        return self.step.tokens * self.plain_s / self.step.seconds


def predict(
    machine: Machine,
    cascade: Cascade,
    batch_size: int,
    context: int,
    most_tokens: int = MOST_TOKENS,
) -> Predicted:
    """The fastest draft lengths.

    Args:
        machine: GPU and target.
        cascade: What drafts.
        batch_size: Requests in a step, of one length.
        context: Tokens of each.
        most_tokens: Longest draft for the target that is tried.
    """
    plain_s = machine.plain_s(batch_size, context)
    choosing_s = machine.choosing_s(cascade, batch_size, context)
    found = []
    for lengths in _choices(cascade, most_tokens):
        drafter = _drafter(machine, cascade, lengths, batch_size, context)
        step = step_of(
            drafter,
            sum(each[0] for each in _by_part(cascade, lengths)),
            batch_size,
            lambda rows: machine.target_s(rows, batch_size, context),
            choosing_s,
        )
        found.append(Predicted(cascade, batch_size, context, plain_s, step, lengths))
    return max(found, key=lambda one: one.speed_up)


def break_even(
    machine: Machine, cascade: Cascade, batch_size: int, most_tokens: int = MOST_TOKENS
) -> int | None:
    """The shortest context at which it is not slower than plain decoding.

    Returns:
        Tokens, ``SHORTEST`` if it pays there already; None if it pays at no context that fits.
    """

    def pays(context: int) -> bool:
        return predict(machine, cascade, batch_size, context, most_tokens).speed_up >= 1.0

    below, context = 0, SHORTEST
    while not pays(context):
        below, context = context, 2 * context
        if context > LONGEST or not machine.fits(cascade, batch_size, below):
            return None
    if not below:
        return SHORTEST if machine.fits(cascade, batch_size, SHORTEST) else None
    for _ in range(_STEPS_TO_BREAK_EVEN):
        middle = (below + context) // 2
        below, context = (below, middle) if pays(middle) else (middle, context)
    return context if machine.fits(cascade, batch_size, context) else None


def _choices(cascade: Cascade, most_tokens: int) -> Iterator[tuple[int, ...]]:
    """Draft lengths to try, a number for each level in order."""
    ranges: list[Sequence[int]] = []
    for part in cascade.parts:
        for place, level in enumerate(part):
            most = MOST_INNER if place else most_tokens
            ranges.append(range(1, most + 1) if level.tokens is None else (level.tokens,))
    return itertools.product(*ranges)


def _by_part(cascade: Cascade, lengths: Sequence[int]) -> list[Sequence[int]]:
    """The same numbers, those of each part together."""
    ends = list(itertools.accumulate((len(part) for part in cascade.parts), initial=0))
    return [lengths[first:end] for first, end in itertools.pairwise(ends)]


def _drafter(
    machine: Machine, cascade: Cascade, lengths: Sequence[int], batch_size: int, context: int
) -> Drafter:
    def stack(levels: Sequence[Level], chunks: Sequence[int]) -> Drafter:
        level = levels[0]
        if level.kind == LOOKUP:
            return Lookup(level.accept, level.us / 1e6)
        return Model(
            level.accept,
            lambda rows: machine.level_s(level, rows, batch_size, context),
            inner=stack(levels[1:], chunks[1:]) if len(levels) > 1 else None,
            chunk=chunks[1] if len(levels) > 1 else 0,
        )

    parts = [
        (stack(part, chunks), chunks[0])
        for part, chunks in zip(cascade.parts, _by_part(cascade, lengths), strict=True)
    ]
    return parts[0][0] if len(parts) == 1 else InTurn(tuple(parts))
