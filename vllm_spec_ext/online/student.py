# SPDX-License-Identifier: Apache-2.0
"""What the trainer asks of a method: a plain torch twin of its drafter, and what it learns from."""

import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.folder import FolderFacts
from vllm_spec_ext.online.trace import Trace

Columns = Mapping[str, Tensor]  # each [n, ...], some rows for each trace
_DRAFT_MODEL = "vllm_spec_ext.online.draft_student:DraftModelStudent"
STUDENTS = {
    "blockwise": "vllm_spec_ext.online.heads_student:HeadsStudent",
    "nar": "vllm_spec_ext.online.nar_student:NarStudent",
    "small_model": _DRAFT_MODEL,
    "token_tree": _DRAFT_MODEL,
}
"""By method; a method of others cannot learn while it serves yet."""
READ_TARGETS = ("blockwise", "nar")
"""Methods whose students need weights of the target."""

MOST_WEIGHT = 10.0
"""Of a start that is recorded seldom; more would let a few of them decide a step."""


class Judged(NamedTuple):
    """Over the draft tokens of a batch whose teacher is known."""

    loss: Tensor  # [] mean divergence, with a gradient
    overlap: Tensor  # [] mean chance of acceptance
    num_drafted: int  # draft tokens; 0 = nothing to learn


class Student(Protocol):
    """A twin of one drafter."""

    module: nn.Module
    row_positions: int
    """Positions that a row of its columns teaches, at most."""

    def load(self, folder: Path) -> None:
        """Take the weights of a version, float32."""

    def columns(self, traces: Sequence[Trace]) -> Columns:
        """What it learns from of these traces, in order."""

    def judge(self, batch: Columns) -> Judged:
        """How far its drafts are from what the target says."""

    def files(self) -> dict[str, bytes]:
        """A version as the method serves it: content by file name."""


def make_student(facts: FolderFacts, device: torch.device) -> Student:
    """The student of a folder's method, without weights of its own yet.

    Raises:
        SpecExtError: The method has none.
    """
    target = STUDENTS.get(facts.method)
    if target is None:
        raise SpecExtError(
            f"{facts.method} cannot learn while it serves; expected {' or '.join(STUDENTS)}"
        )
    student: Student = pkgutil.resolve_name(target)(facts, device)
    return student
