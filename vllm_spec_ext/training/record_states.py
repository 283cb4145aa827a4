# SPDX-License-Identifier: Apache-2.0
"""Keeps the hidden states that the target computes anyway while it writes the training text.

A second pass over that text, only to get its states, costs as much as training the heads. This
"proposer" drafts nothing and writes down what it is shown: the state before every new token.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from vllm_spec_ext.atomic import disk_full_named
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    Needs,
    StepContext,
    proposer,
)

METHOD = "record_states"


class RecordOptions(MethodOptions):
    """Where the states go."""

    folder: str = Field(min_length=1)
    """Folder for one file a request, rows appended when it ends or is preempted."""


@proposer(
    METHOD,
    summary="Drafts nothing; writes down the target's hidden states for training.",
    options=RecordOptions,
    num_speculative_tokens=1,
)
class RecordStates(BaseProposer):
    """One row of float32 for each new token of each request."""

    needs = Needs(hidden_states=True, every_step=True)
    options: RecordOptions

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self._rows: dict[str, list[np.ndarray]] = {}

    def propose(self, step: StepContext) -> list[Draft]:
        """No drafts."""
        if step.hidden_states is not None:
            states = step.hidden_states.float().cpu().numpy()
            for request, row in zip(step.requests, states, strict=True):
                self._rows.setdefault(request.request_id, []).append(row)
        return [EMPTY_DRAFT] * len(step.requests)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Append what these requests gave; a preempted one goes on later."""
        for request_id in request_ids:
            rows = self._rows.pop(request_id, None)
            if rows is not None:
                path = states_file(Path(self.options.folder), request_id)
                with disk_full_named(path), path.open("ab") as file:
                    file.write(np.stack(rows).tobytes())


def states_file(folder: Path, request_id: str) -> Path:
    """Raw float32 rows of a request."""
    return folder / f"{request_id}.f32"


def forget_states(folder: Path) -> None:
    """Delete states that nobody will collect, and no file of others."""
    for path in folder.glob("*.f32"):
        path.unlink()


def collect(folder: Path, request_id: str, num_tokens: int, hidden_size: int) -> np.ndarray:
    """[num_tokens, hidden_size] float32 states before each new token; the file is deleted.

    Raises:
        SpecExtError: The engine recorded nothing for the request, or not one row a token.
    """
    path = states_file(folder, request_id)
    if not path.exists():  # vLLM adds a suffix of its own to a request's name
        path = next(folder.glob(f"{request_id}-*.f32"), path)
    if not path.exists():
        raise SpecExtError(
            f"vLLM recorded no hidden states for request {request_id} in {folder}; run again, or "
            "without --cache-hidden for the data stage"
        )
    values = np.fromfile(path, np.float32)
    path.unlink()
    if values.size != num_tokens * hidden_size:
        raise SpecExtError(
            f"{path} holds {values.size} numbers, expected {num_tokens} states of {hidden_size}; "
            "run again, or without --cache-hidden for the data stage"
        )
    return values.reshape(num_tokens, hidden_size)
