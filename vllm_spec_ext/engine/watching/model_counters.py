# SPDX-License-Identifier: Apache-2.0
"""What each draft model did, from the worker to the front end; beside the other counters."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

logger = logging.getLogger("vllm.spec_ext")

MODEL_COUNTERS = {
    "draft_model_forwards": "Forward passes of a draft model, or of the target over a view.",
    "draft_model_rows": "Tokens that were read in them.",
    "draft_model_seconds": "Time of these passes.",
}


class ModelCounterWriter:
    """The worker's end, of one model; a small file mapped by both, as of the other counters."""

    def __init__(self, folder: str | None, rank: int, index: int) -> None:
        """Start at zero; without a folder nothing is shown.

        Args:
            folder: Of the engine's counters.
            rank: Of the replica that writes.
            index: Of the model.
        """
        self._values = np.zeros(len(MODEL_COUNTERS))
        if folder is None or not Path(folder).is_dir():
            return
        path = Path(folder) / f"{rank}.{index}.draft_model"
        try:
            path.write_bytes(self._values.tobytes())
            self._values = np.memmap(path, np.float64, "r+", shape=self._values.shape)
        except OSError as error:
            logger.warning("vllm-spec-ext: no metrics of draft models: %s", error)

    def show(self, forwards: int, rows: int, seconds: float) -> None:
        """All of it since the engine started."""
        self._values[:] = forwards, rows, seconds


def model_readings(folders: Iterable[str], index: int) -> Sequence[float]:
    """What the model of this index did in all replicas, in the order of :data:`MODEL_COUNTERS`."""
    total = np.zeros(len(MODEL_COUNTERS))
    for folder in folders:
        for path in Path(folder).glob(f"*.{index}.draft_model"):
            values = np.fromfile(path)
            if len(values) == len(total):  # else just being made
                total += values
    found: list[float] = total.tolist()
    return found
