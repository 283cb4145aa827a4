# SPDX-License-Identifier: Apache-2.0
"""The one JSON of ``make gpu-check``; it is whole on disk after every check."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_spec_ext.atomic import write_json

FORMAT = "gpu-check 1"
Outcome = Literal["passed", "failed", "not run"]
MARKS: Mapping[Outcome, str] = {"passed": "ok", "failed": "FAILED", "not run": "NOT RUN"}


@dataclass(frozen=True)
class CheckResult:
    """What became of a check."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    reason: str | None = None  # why it did not pass
    found: Mapping[str, Any] = field(default_factory=dict)  # JSON-ready figures


@dataclass
class Report:
    """Everything that is sent back."""

    path: Path
    expected: Sequence[str]  # names of all checks
    machine: Mapping[str, Any]
    provenance: Mapping[str, Any]
    results: list[CheckResult] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        """Checks begin now; some run side by side."""
        self._began = self.clock()

    @property
    def passed(self) -> bool:
        """Whether every check ran and none failed."""
        passed = [result.name for result in self.results if result.outcome == "passed"]
        return sorted(passed) == sorted(self.expected)

    def add(self, result: CheckResult) -> None:
        """One more result, and the file anew."""
        self.results.append(result)
        self.write()

    def write(self) -> None:
        """Replace the file at once; a check that has no result yet stands in it as not run."""
        known = {result.name: result for result in self.results}
        results = [known.get(name, CheckResult(name, "not run")) for name in self.expected]
        whole = {
            "format": FORMAT,
            "passed": self.passed,
            "seconds": round(self.clock() - self._began, 1),
            "machine": dict(self.machine),
            "provenance": dict(self.provenance),
            "checks": [asdict(result) for result in results],
        }
        write_json(self.path, whole)


def line(result: CheckResult) -> str:
    """A result for a terminal."""
    text = f"{MARKS[result.outcome]:>7}  {result.name} ({result.seconds:.0f} s)"
    return f"{text}: {result.reason}" if result.reason else text
