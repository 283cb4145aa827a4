# SPDX-License-Identifier: Apache-2.0
"""One round of drafting: the reviews that many requests ask for, in as few passes as possible."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_spec_ext.proposers.cascade.judging import Chance, Verdict, judge_chosen, judge_drawn
from vllm_spec_ext.proposers.cascade.reviewer import Reviewer, ReviewRound
from vllm_spec_ext.proposers.cascade.writing import Review, Text, Writing
from vllm_spec_ext.proposers.growth.drawing import distributions
from vllm_spec_ext.proposers.records import RequestStep


@dataclass(eq=False)
class Task:
    """One request that is being drafted for."""

    row: int  # in the StepContext
    room: int  # most tokens of its draft
    text: Text
    writing: Writing
    chance: Chance | None  # None: tokens are chosen
    review: Review | None = None  # that it waits for
    was_served: bool = False  # by a pass


@dataclass(frozen=True)
class Pass:
    """A forward pass that was run."""

    level: int
    num_rows: int
    num_requests: int


def run_round(
    reviewers: Mapping[int, Reviewer],
    requests: Sequence[RequestStep],
    tasks: Sequence[Task],
    lenience: Mapping[int, float],
) -> list[Pass]:
    """Let all requests write their drafts.

    The lowest level that any request waits for goes first: so the passes of the higher ones, which
    cost more, serve more requests.

    Args:
        reviewers: By level.
        requests: Of the step.
        tasks: What is written for which of them; their texts are the result.
        lenience: By level, for chosen tokens.

    Returns:
        The passes, in their order.
    """
    passes: list[Pass] = []
    rounds: dict[int, ReviewRound] = {}
    for task in tasks:
        _go_on(task, None)
    while True:
        levels = [task.review.level for task in tasks if task.review is not None]
        if not levels:
            return passes
        level = min(levels)
        if level not in rounds:
            rows, room = [task.row for task in tasks], [task.room for task in tasks]
            rounds[level] = reviewers[level].begin(requests, rows, room)
        waiting = [task.review is not None and task.review.level == level for task in tasks]
        feeds = [
            task.text.unread(level) if waits else []
            for task, waits in zip(tasks, waiting, strict=True)
        ]
        rounds[level].keep([task.text.read[level] for task in tasks])
        found = rounds[level].run(feeds)
        passes.append(Pass(level, sum(map(len, feeds)), sum(waiting)))
        verdicts = _judge(requests, tasks, found, lenience[level])
        for task, waits, verdict in zip(tasks, waiting, verdicts, strict=True):
            if waits:
                task.was_served |= verdict is not None
                _go_on(task, verdict)


def _go_on(task: Task, verdict: Verdict | None) -> None:
    """Let a request write until it needs a review; none is left if it is done."""
    try:
        # A coroutine that was not begun takes None.
        task.review = task.writing.send(verdict)
    except StopIteration:
        task.review = None


def _judge(
    requests: Sequence[RequestStep],
    tasks: Sequence[Task],
    found: Sequence[torch.Tensor | None],
    lenience: float,
) -> list[Verdict | None]:
    """The verdicts of one pass; None for those that it did not serve."""
    verdicts: list[Verdict | None] = [None] * len(tasks)
    chosen: list[int] = []
    drawn: list[int] = []
    logits: dict[int, torch.Tensor] = {}
    for place, (task, rows) in enumerate(zip(tasks, found, strict=True)):
        if rows is None or task.review is None:
            continue
        # Rows before the last one of the text that stood are of no use any more.
        logits[place] = rows[len(rows) - 1 - (len(task.text) - task.review.start) :]
        (chosen if task.chance is None else drawn).append(place)
    if chosen:
        judged = judge_chosen(
            [logits[place] for place in chosen],
            [_chunk(tasks[place]) for place in chosen],
            lenience,
        )
        for place, verdict in zip(chosen, judged, strict=True):
            verdicts[place] = verdict
    if drawn:
        own = _distributions(requests, tasks, drawn, logits)
        for place, h in zip(drawn, own, strict=True):
            task = tasks[place]
            assert task.review is not None
            assert task.chance is not None
            drawn_from = task.text.drawn_from[task.review.start :]
            verdicts[place] = judge_drawn(h, _chunk(task), drawn_from, task.chance)
    return verdicts


def _chunk(task: Task) -> list[int]:
    assert task.review is not None
    return task.text.tokens[task.review.start :]


def _distributions(
    requests: Sequence[RequestStep],
    tasks: Sequence[Task],
    places: Sequence[int],
    logits: Mapping[int, torch.Tensor],
) -> Sequence[torch.Tensor]:
    """[n, vocab] of each of these tasks: what its request's sampling makes of the logits."""
    sizes = [len(logits[place]) for place in places]
    asked = [
        requests[tasks[place].row]
        for place, size in zip(places, sizes, strict=True)
        for _ in range(size)
    ]
    probs = distributions(
        torch.cat([logits[place] for place in places]),
        [request.temperature for request in asked],
        [request.top_k for request in asked],
        [request.top_p for request in asked],
    )
    return probs.split(sizes)
