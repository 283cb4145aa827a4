# SPDX-License-Identifier: Apache-2.0
"""What the processes of an engine hold and do, seen from outside."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_Figure = TypeVar("_Figure")

LEAST_CORE = 0.01  # of one core; processes that wait for each other wake up now and then
LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class Work:
    """Of a process group, up to now."""

    cpu_s: float
    disk_bytes: int  # read from disks, and written; 0 where the system does not count them

    def differs(self, earlier: "Work", seconds: float) -> bool:
        """Whether something was done in the ``seconds`` since; also if a process has ended."""
        return (
            abs(self.cpu_s - earlier.cpu_s) >= LEAST_CORE * seconds
            or abs(self.disk_bytes - earlier.disk_bytes) >= LEAST_BYTES
        )


def work_of(process_group: int) -> Work:
    """Processor time and disk traffic of a process group, ended children included."""

    def work(process: Any) -> Work:
        cpu_s = sum(process.cpu_times()[:4])  # its own, and of children that have ended
        if not hasattr(process, "io_counters"):  # another system
            return Work(cpu_s, 0)
        counters = process.io_counters()
        return Work(cpu_s, counters.read_bytes + counters.write_bytes)

    found = _of_each(process_group, work)
    return Work(sum(one.cpu_s for one in found), sum(one.disk_bytes for one in found))


def resident_bytes(process_group: int) -> int:
    """Resident memory of a process group, in bytes (pages shared by several count once each)."""
    return sum(_of_each(process_group, lambda process: process.memory_info().rss))


def _of_each(process_group: int, figure: Callable[[Any], _Figure]) -> list[_Figure]:
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == process_group:
                found.append(figure(process))
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue  # ended meanwhile, or not ours
    return found
