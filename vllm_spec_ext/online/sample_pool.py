# SPDX-License-Identifier: Apache-2.0
"""The samples on disk as batches: newest ones and earlier ones, and some kept apart."""

import logging
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.sample_files import number_of, read_shard, shards
from vllm_spec_ext.online.student import Columns
from vllm_spec_ext.online.trace import Trace

logger = logging.getLogger("vllm.spec_ext")

_NEWEST = 8  # shards
_HELD_OUT_EVERY = 16  # requests
_HELD_OUT_MOST = 512  # positions, the newest


class SamplePool:
    """All shards of a folder, turned into columns once and kept in memory."""

    def __init__(
        self,
        folder: Path,
        columns: Callable[[Sequence[Trace]], Columns],
        row_positions: int = 1,
        *,
        likeliest: int,
    ) -> None:
        """Read nothing yet.

        Args:
            folder: Of the samples.
            columns: What a student learns from.
            row_positions: Positions that a row of these teaches.
            likeliest: Tokens of each distribution; samples with more are cut, those with fewer,
                of an engine with other options, left out.
        """
        self._folder = folder
        self._columns = columns
        self._row_positions = row_positions
        self._likeliest = likeliest
        self._train: dict[int, Columns] = {}  # by number of the shard, ascending
        self._held_out: dict[int, Columns] = {}
        self._bad: set[Path] = set()
        self.position = 0
        """Newest shard that was read."""

    @property
    def num_positions(self) -> int:
        """That are trained on."""
        return self.num_positions_to(self.position)

    def num_positions_to(self, position: int) -> int:
        """Those of shards up to a number."""
        held = [columns for number, columns in self._train.items() if number <= position]
        return self._row_positions * sum(map(_length, held))

    def refresh(self) -> int:
        """Read what is new, forget what was deleted.

        Returns:
            Positions that are gone.
        """
        before = self.num_positions
        found = {number_of(path): path for path in shards(self._folder) if path not in self._bad}
        for number in self._train.keys() - found.keys():
            self._train.pop(number)
            self._held_out.pop(number, None)
        gone = before - self.num_positions
        for number in sorted(found.keys() - self._train.keys()):
            try:
                traces = [trace.cut(self._likeliest) for trace in read_shard(found[number])]
            except (SpecExtError, OSError) as error:
                logger.warning("vllm-spec-ext: samples left out: %s", error)
                self._bad.add(found[number])
                continue
            apart = [_is_apart(trace) for trace in traces]
            kept = [trace for trace, aside in zip(traces, apart, strict=True) if not aside]
            aside = [trace for trace, aside in zip(traces, apart, strict=True) if aside]
            self._train[number] = self._columns(kept) if kept else {}
            if aside:
                self._held_out[number] = self._columns(aside)
            self.position = max(self.position, number)
        return gone

    def batch(self, size: int, replay: float, random: np.random.Generator) -> Columns:
        """Positions to learn from.

        Args:
            size: Of them, if there are so many; at least one row.
            replay: Share that is drawn from all shards; the rest is from the newest.
            random: Chooses.
        """
        size = max(1, size // self._row_positions)
        numbers = [number for number in sorted(self._train) if _length(self._train[number])]
        num_old = int((random.random(size) < replay).sum())
        return _joined(
            [
                self._draw(numbers, num_old, random),
                self._draw(numbers[-_NEWEST:], size - num_old, random),
            ]
        )

    def held_out(self) -> Columns:
        """The newest positions of requests that are never trained on; empty without any."""
        parts, count = [], 0
        most = max(1, _HELD_OUT_MOST // self._row_positions)
        for number in sorted(self._held_out, reverse=True):
            if count >= most:
                break
            parts.append(self._held_out[number])
            count += _length(parts[-1])
        joined = _joined(parts)
        return {name: values[:most] for name, values in joined.items()}

    def _draw(self, numbers: list[int], size: int, random: np.random.Generator) -> Columns:
        ends = np.cumsum([_length(self._train[number]) for number in numbers])
        if not size or not len(ends):
            return {}
        chosen = np.sort(random.integers(ends[-1], size=size))
        owners = np.searchsorted(ends, chosen, side="right")
        parts = []
        for owner in np.unique(owners).tolist():
            first = int(ends[owner - 1]) if owner else 0
            picked = torch.from_numpy(chosen[owners == owner] - first)
            columns = self._train[numbers[owner]]
            parts.append({name: values[picked] for name, values in columns.items()})
        return _joined(parts)


def _is_apart(trace: Trace) -> bool:
    """By its prompt, so that all of a request, and requests with the same one, are on one side."""
    end = trace.num_prompt_tokens
    if end is None:  # right for the first stretch of a request alone
        end = int(trace.rows[0]) + 1
    return zlib.crc32(trace.token_ids[:end].tobytes()) % _HELD_OUT_EVERY == 0


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values()))) if columns else 0


def _joined(parts: Sequence[Columns]) -> Columns:
    parts = [part for part in parts if _length(part)]
    if not parts:
        return {}
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
