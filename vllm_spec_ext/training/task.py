# SPDX-License-Identifier: Apache-2.0
"""What a method's training must offer to the stages that all methods share."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from vllm_spec_ext.training.batches import BatchPlan, Split
from vllm_spec_ext.training.hidden import HiddenSource
from vllm_spec_ext.training.loop import Task
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import Target


class Figures(Protocol):
    """What was measured on held-out texts."""

    @property
    def target_agreement(self) -> float:
        """Positions where the target itself predicts the text's next token, 0 to 1."""


class DraftTask(Task, Protocol):
    """What drafts, its target and its data, as the shared stages want them.

    Its loss is in ``train_step``, its evaluation in ``evaluate`` and ``measure``; what its batches
    hold beyond tokens is its plan's :class:`~.batches.PositionInputs`.
    """

    target: Target
    data: TokenData
    split: Split
    plan: BatchPlan

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""

    @property
    def shape(self) -> str:
        """What is trained, e.g. ``4 heads of width 96, 1,234 parameters``."""

    @property
    def size_line(self) -> str:
        """For a dry run: the result's shape and size."""

    def disk_lines(self) -> list[str]:
        """For a dry run: what else the method writes, beside the result and the state."""

    def measure(self, *, num_sequences: int | None = None) -> Figures:
        """Figures of all held-out texts, or of the first ``num_sequences``."""


TaskT = TypeVar("TaskT", bound=DraftTask)
MakeTask = Callable[[Target, TokenData, HiddenSource], TaskT]
