# SPDX-License-Identifier: Apache-2.0
"""What a server's processes hold, sampled over time, and whether it grows."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LEAST_MIB = 8  # of a process tree, below which growth is an allocator's doing
_MOST_MIB_AN_HOUR = 60
_MOST_MORE = 4  # files, threads, processes


@dataclass(frozen=True)
class Sample:
    """All processes of one server at one time."""

    seconds: float  # since the load began
    memory_bytes: int  # resident; pages that processes share count in each
    open_files: int
    threads: int
    processes: int


def sample(pid: int, seconds: float) -> Sample:
    """Look at a process and all below it."""
    import psutil

    first = psutil.Process(pid)
    memory, files, threads, count = 0, 0, 0, 0
    for process in [first, *first.children(recursive=True)]:
        try:
            with process.oneshot():
                memory += process.memory_info().rss
                files += process.num_fds()
                threads += process.num_threads()
                count += 1
        except psutil.NoSuchProcess:
            continue
    return Sample(seconds, memory, files, threads, count)


def row(name: str, taken: Sample) -> str:
    """One line of the table."""
    return (
        f"{taken.seconds / 60:6.1f} min  {name:<12} {taken.memory_bytes / 2**20:8.1f} MiB"
        f" {taken.open_files:5} files {taken.threads:5} threads {taken.processes:3} processes"
    )


def growth(name: str, samples: Sequence[Sample], warm_s: float) -> str:
    """Compare the last sample with the first one after the warm-up.

    Args:
        name: Of the server.
        samples: In order of time.
        warm_s: Seconds at the start that do not count.
    """
    counted = [taken for taken in samples if taken.seconds >= warm_s]
    if len(counted) < 2:
        return f"{name}: too short to say whether anything grows"
    first, last = counted[0], counted[-1]
    middle = counted[len(counted) // 2]
    hours = (last.seconds - first.seconds) / 3600
    return (
        f"{name}: from minute {first.seconds / 60:.0f} to {last.seconds / 60:.0f}:"
        f" memory {_mib(first)} -> {_mib(middle)} (half way) -> {_mib(last)} MiB"
        f" ({(last.memory_bytes - first.memory_bytes) / 2**20 / hours:+.0f} MiB/h),"
        f" open files {_range(taken.open_files for taken in counted)},"
        f" threads {_range(taken.threads for taken in counted)}"
    )


def grew(name: str, samples: Sequence[Sample], warm_s: float) -> str | None:
    """What grows, by the middle of the second half beside that of the first; None: nothing.

    Args:
        name: Of the server.
        samples: In order of time.
        warm_s: Seconds at the start that do not count.
    """
    counted = [taken for taken in samples if taken.seconds >= warm_s]
    half = len(counted) // 2
    if half < 3:
        return None  # too short to say
    first, second = counted[:half], counted[half:]
    hours = (_middle(second, "seconds") - _middle(first, "seconds")) / 3600
    mib = (_middle(second, "memory_bytes") - _middle(first, "memory_bytes")) / 2**20
    if mib > _LEAST_MIB and mib / hours > _MOST_MIB_AN_HOUR:
        return f"{name}: memory grows by {mib / hours:.0f} MiB an hour"
    for what in ("open_files", "threads", "processes"):
        more = _middle(second, what) - _middle(first, what)
        if more > _MOST_MORE:
            return f"{name}: {more:.0f} {what} more"
    return None


def _middle(samples: Sequence[Sample], what: str) -> float:
    return statistics.median(getattr(taken, what) for taken in samples)


def _mib(taken: Sample) -> str:
    return f"{taken.memory_bytes / 2**20:.0f}"


def _range(values: Iterable[int]) -> str:
    """First, last and largest."""
    found = list(values)
    return f"{found[0]} -> {found[-1]} (at most {max(found)})"
