# SPDX-License-Identifier: Apache-2.0
"""What became of each source's draft tokens, where a method drafts from several.

Beside the other counters (:mod:`.shared_counters`): a file for each source, made when it first
names a token.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import Draft, StepContext, StepOutcome

logger = logging.getLogger("vllm.spec_ext")

SOURCE_COUNTERS = {
    "source_verified_nodes": "Draft tokens that a source named and the target verified.",
    "source_accepted_nodes": "Those that were accepted; a token counts for all of its sources.",
}
_SUFFIX = ".draft_source"

Names = tuple[tuple[str, ...], ...]


class SourceCounterWriter:
    """The worker's end."""

    def __init__(self, folder: str | None, rank: int) -> None:
        """Start without any source; without a folder nothing is shown.

        Args:
            folder: Of the engine's counters.
            rank: Of the replica that writes.
        """
        self._folder = folder
        self._rank = rank
        self._values: dict[str, NDArray[np.float64]] = {}
        self._waiting: dict[str, Names] = {}

    def drafted(self, step: StepContext, drafts: Sequence[Draft]) -> None:
        """Remember who named the nodes of these drafts."""
        for request, draft in zip(step.requests, drafts, strict=True):
            self._waiting.pop(request.request_id, None)  # one that was never verified
            if draft.sources is not None and len(draft):
                self._waiting[request.request_id] = draft.sources

    def verified(self, outcomes: Sequence[StepOutcome]) -> None:
        """Count what became of them."""
        for outcome in outcomes:
            named = self._waiting.pop(outcome.request_id, ())
            for node, names in enumerate(named[: outcome.num_drafted]):
                accepted = node in outcome.accepted
                for name in names:
                    values = self._values.get(name)
                    if values is None:
                        values = self._values[name] = self._new(name)
                    values += (1.0, float(accepted))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def _new(self, name: str) -> NDArray[np.float64]:
        zeros = np.zeros(len(SOURCE_COUNTERS))
        if self._folder is None or not Path(self._folder).is_dir():
            return zeros
        path = Path(self._folder) / f"{self._rank}.{quote(name, safe=' ')}{_SUFFIX}"
        try:
            path.write_bytes(zeros.tobytes())
            return np.memmap(path, np.float64, "r+", shape=zeros.shape)
        except OSError as error:
            logger.warning("vllm-spec-ext: no metrics of the source %s: %s", name, error)
            return zeros


def source_readings(folders: Iterable[str]) -> dict[str, list[float]]:
    """By source, what became of its tokens in all replicas; in the order of the counters."""
    found: dict[str, list[float]] = {}
    for folder in folders:
        for path in sorted(Path(folder).glob(f"*{_SUFFIX}")):
            name = unquote(path.name.removesuffix(_SUFFIX).partition(".")[2])
            values = np.fromfile(path)
            if len(values) == len(SOURCE_COUNTERS):  # else just being made
                old = found.get(name, [0.0] * len(values))
                found[name] = [a + b for a, b in zip(old, values.tolist(), strict=True)]
    return found
