# SPDX-License-Identifier: Apache-2.0
"""The slowest stretch of a run beside plain decoding's time for the same tokens.

A mean hides it: a method that is ahead by half on most texts may be behind for a minute on one.
Stretches are counted in steps of the engine, prefills left out, over answers in the order of their
questions; plain decoding measured a second time shows how much of what is seen is noise.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.bench.records import QuestionRecord, TurnRecord

NUM_STEPS = 200


def slowest_window(
    own: Sequence[QuestionRecord], plain: Sequence[QuestionRecord], batch_size: int
) -> float | None:
    """Lowest speed-up over any :data:`NUM_STEPS` steps, or over all if there are fewer.

    Args:
        own: Answers of a method, in order.
        plain: Plain decoding's answers to the same questions; those with other tokens are left
            out, as their times cannot be compared.
        batch_size: Requests in flight: so many steps of requests are one of the engine.

    Returns:
        The speed-up; None if no answer can be compared.
    """
    turns = [
        pair
        for mine, theirs in zip(own, plain, strict=True)
        for pair in zip(mine.turns, theirs.turns, strict=False)
        if pair[0].token_ids == pair[1].token_ids
    ]
    parts = [_seconds(mine, theirs) for mine, theirs in turns]
    if not any(len(part) for part in parts):
        return None
    return lowest_speed(np.concatenate(parts), NUM_STEPS * batch_size)


def lowest_speed(steps: NDArray[np.float64], width: int) -> float:
    """Lowest speed-up over so many steps in a row, or over all if there are fewer.

    Args:
        steps: [num_steps, 2] what each took, and what its tokens took plainly; at least one.
        width: Of a stretch.
    """
    sums = np.concatenate([np.zeros((1, 2)), steps.cumsum(axis=0)])
    width = min(width, len(steps))
    taken, would_take = (sums[width:] - sums[:-width]).T
    return float((would_take / taken).min())


def _seconds(mine: TurnRecord, theirs: TurnRecord) -> NDArray[np.float64]:
    """[num_steps, 2] what each decoding step took, and what its tokens took plainly."""
    steps = theirs.decode_steps
    usual = np.mean([theirs.step_s[step] for step in steps]) if steps else 0.0
    # Beside another request's prefill a step of either says nothing of decoding.
    seconds = np.full(len(theirs.token_ids), usual)
    seconds[steps] = [theirs.step_s[step] for step in steps]
    ends = np.cumsum(mine.step_sizes)
    found = [
        (mine.step_s[step], seconds[ends[step - 1] : ends[step]].sum())
        for step in mine.decode_steps
    ]
    return np.array(found if steps else [], dtype=np.float64).reshape(-1, 2)
