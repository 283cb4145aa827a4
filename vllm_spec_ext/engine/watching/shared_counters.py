# SPDX-License-Identifier: Apache-2.0
"""Counters that the worker counts and the front end shows.

The worker is another process, and vLLM has no channel for a plugin's figures. A small file mapped
by both costs an addition a step and needs no lock: one worker writes (the first rank of each data
parallel group), others read. The configuration names the folder and nothing more: it may be built
on another machine than the engine's. The worker makes the folder, the front end removes it. Where
the two are on different machines, nothing is shown.
"""

import logging
import tempfile
import uuid
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

import numpy as np

logger = logging.getLogger("vllm.spec_ext")

COUNTERS = {
    "steps": "Requests' decoding steps, with and without a draft.",
    "emitted_tokens": "Tokens that those steps gave, bonus tokens included.",
    "empty_drafts": "Requests' decoding steps without a draft to verify.",
    "verified_drafts": "Requests' decoding steps with a draft to verify.",
    "drafted_nodes": "Draft tokens (chain tokens or tree nodes) that the proposer made.",
    "verified_nodes": "Draft tokens that the target verified.",
    "accepted_nodes": "Draft tokens that it accepted.",
    "branching_drafts": "Drafts with branches.",
    "refused_drafts": "Drafts lost because the proposer failed or returned a broken one.",
    "shadow_nodes": "Draft tokens that were only compared with what the target went on to say.",
    "held_back": "Requests' steps in which drafts were limited or left out because they lost time.",
}
BUCKETS_US = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000)
_INDEX = {name: place for place, name in enumerate(COUNTERS)}
_FIRST_BUCKET = len(COUNTERS)
_SUM = _FIRST_BUCKET + len(BUCKETS_US) + 1  # one more bucket for all that is slower
_SIZE = _SUM + 1


def new_key() -> str:
    """A name for the counters of one engine, on whichever machine that will run."""
    return uuid.uuid4().hex


def folder_of(key: str) -> str:
    """The folder on this machine for counters of this name; it need not exist."""
    return str(Path(tempfile.gettempdir()) / f"vllm-spec-ext-{key}")


class CounterWriter:
    """The worker's end."""

    def __init__(self, folder: str | None, rank: int) -> None:
        """Start at zero, and make the folder; without one it counts for itself alone."""
        self._values = np.zeros(_SIZE)
        if folder is None:
            return
        path = Path(folder) / f"{rank}.counters"
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_bytes(self._values.tobytes())  # really there: no surprise on a full disk
            # As a plain array, whose items are faster to change.
            self._values = np.asarray(np.memmap(path, np.float64, "r+", shape=(_SIZE,)))
        except OSError as error:
            logger.warning("vllm-spec-ext: no %s metrics: %s", "spec_ext:*", error)

    def add(self, **counts: float) -> None:
        """Add to counters by name."""
        for name, count in counts.items():
            self._values[_INDEX[name]] += count

    def time(self, microseconds: float) -> None:
        """Count one call of the proposer."""
        self._values[_FIRST_BUCKET + bisect_left(BUCKETS_US, microseconds)] += 1
        self._values[_SUM] += microseconds


class CounterReadings:
    """What all workers of an engine have counted so far."""

    def __init__(self, folders: Iterable[str]) -> None:
        """Add up every file of the folders."""
        total = np.zeros(_SIZE)
        for folder in folders:
            for path in Path(folder).glob("*.counters"):
                values = np.fromfile(path)
                if len(values) == _SIZE:  # else just being made
                    total += values
        self._values = total

    def __getitem__(self, name: str) -> float:
        """A counter by name."""
        return float(self._values[_INDEX[name]])

    @property
    def time_buckets(self) -> list[tuple[str, float]]:
        """Pairs of upper bound ("+Inf" last) and calls up to it, as Prometheus counts."""
        counts = np.cumsum(self._values[_FIRST_BUCKET:_SUM])
        bounds = [*(str(float(bound)) for bound in BUCKETS_US), "+Inf"]
        return list(zip(bounds, counts.tolist(), strict=True))

    @property
    def total_time_us(self) -> float:
        """All calls of the proposer together."""
        return float(self._values[_SUM])
