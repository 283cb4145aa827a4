# SPDX-License-Identifier: Apache-2.0
"""How far a lossy method's answers drift from plain decoding's."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_spec_ext.bench.records import Run


@dataclass(frozen=True)
class Drift:
    """One lossy method at one batch size, over its first repeat."""

    method: str
    batch_size: int
    share_identical: float
    edit_distance: float  # mean of token edits / tokens of the longer answer, 0 to 1
    log_prob: float  # mean log-probability of an emitted token under the plain target, nats
    plain_log_prob: float  # the same of plain decoding's own answers


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Levenshtein distance of two token sequences."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def first_answers(run: Run) -> list[tuple[int, tuple[int, ...]]]:
    """Question and tokens of each first turn; later turns have other prompts by then."""
    return [(record.index, record.turns[0].token_ids) for record in run.result.questions]


def drift_of(
    run: Run, plain: Run, log_probs: Sequence[float], plain_log_probs: Sequence[float]
) -> Drift:
    """Compare a run with plain decoding's.

    Args:
        run: Of the lossy method.
        plain: Of plain decoding, over the same questions.
        log_probs: For each question the sum of its answer's token log-probabilities under the
            plain target.
        plain_log_probs: The same for plain decoding's answers.
    """
    found, expected = first_answers(run), first_answers(plain)
    distances = [
        edit_distance(a, b) / max(len(a), len(b), 1)
        for (_, a), (_, b) in zip(found, expected, strict=True)
    ]
    return Drift(
        method=run.method,
        batch_size=run.batch_size,
        share_identical=sum(a == b for a, b in zip(found, expected, strict=True)) / len(found),
        edit_distance=sum(distances) / len(distances),
        log_prob=sum(log_probs) / max(1, sum(len(tokens) for _, tokens in found)),
        plain_log_prob=sum(plain_log_probs) / max(1, sum(len(tokens) for _, tokens in expected)),
    )
