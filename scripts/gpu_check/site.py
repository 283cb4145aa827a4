# SPDX-License-Identifier: Apache-2.0
"""Where a check runs: how it gets engines there, and what is compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPU_ENGINE: dict[str, Any] = {
    "gpu_memory_utilization": 0.1,  # several at once; their caches are small all the same
    "kv_cache_memory_bytes": 64 << 20,
}
CAPTURED = [1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 72, 96]  # tokens of a step; each costs start time


class CheckFailed(Exception):
    """What was found is not what was expected; the message has both."""

    def __init__(self, reason: str, found: dict[str, Any] | None = None) -> None:
        """Keep the figures beside the reason."""
        super().__init__(reason)
        self.found = found or {}


@dataclass(frozen=True)
class Site:
    """A machine with the tiny model on it."""

    start: Callable[..., Any]  # keyword arguments of ``LLM`` -> an engine in this process
    folder: Path  # for what a check writes
    on_gpu: bool = True
    small_model: str | None = None  # name or folder; None: the demo model

    def engine(self, *, backend: str | None = None, **arguments: Any) -> Any:
        """An engine, eager unless it is told otherwise.

        Args:
            backend: Attention backend on a GPU; a CPU has one alone.
            **arguments: Of ``LLM``, beside those of ``tests/engine/tiny_engine.py``.
        """
        if not self.on_gpu:
            return self.start(**arguments)
        if backend is not None:
            arguments["attention_backend"] = backend
        return self.start(**{**GPU_ENGINE, **arguments})

    def with_graphs(self, mode: str, **arguments: Any) -> Any:
        """An engine that is compiled and has CUDA graphs of this mode; eager on a CPU."""
        if self.on_gpu:
            arguments["enforce_eager"] = False
            arguments["compilation_config"] = {
                "cudagraph_mode": mode,
                "cudagraph_capture_sizes": CAPTURED,
            }
        return self.engine(**arguments)


def require(condition: object, reason: str, **found: Any) -> None:
    """Raise CheckFailed unless the condition holds."""
    if not condition:
        raise CheckFailed(reason, found)


def require_identical(
    what: str, expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> int:
    """Number of tokens compared.

    Args:
        what: For the message.
        expected: Tokens of each answer of plain decoding.
        found: Those of the engine under test.

    Raises:
        CheckFailed: Names the first places that differ.
    """
    differences = []
    for number, (true, ours) in enumerate(zip(expected, found, strict=True)):
        place = first_difference(true, ours)
        if place is not None:
            differences.append(
                {
                    "answer": number,
                    "place": place,
                    "expected": list(true[place : place + 4]),
                    "found": list(ours[place : place + 4]),
                }
            )
    if differences:
        raise CheckFailed(
            f"{what}: {len(differences)} of {len(expected)} answers differ from plain decoding, "
            f"expected none; the first in answer {differences[0]['answer']} at token "
            f"{differences[0]['place']}",
            {"differences": differences[:8]},
        )
    return sum(len(answer) for answer in expected)


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Place of the first token that differs, or where one answer ends; None if none does."""
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return place
    return None if len(expected) == len(found) else min(len(expected), len(found))
