# SPDX-License-Identifier: Apache-2.0
"""Ends an engine whose benchmark was killed, also while the engine is stopped.

vLLM's engine core does not notice that its parent was killed (seen with 0.32), and a stopped
process notices nothing at all. So each engine process forks a watcher, outside its process group,
that waits for the benchmark to close its end of a pipe; the kernel does that in any case. A byte in
the pipe tells it that the benchmark ends the engine itself.
"""

import contextlib
import os
import select
import signal
import time

GRACE_S = 5.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1


def watch(benchmark_fd: int) -> None:
    """Fork the watcher; returns in the engine's process. Call it before any thread is started.

    Args:
        benchmark_fd: Reading end of a pipe whose only writer is the benchmark.
    """
    group = os.getpid()  # EngineClient makes us the leader of our own
    if os.fork():
        os.close(benchmark_fd)
        return
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # The pipe for commands must not stay open with us when the engine's process ends.
        os.closerange(0, benchmark_fd)
        os.closerange(benchmark_fd + 1, os.sysconf("SC_OPEN_MAX"))
        poll = select.poll()
        poll.register(benchmark_fd, select.POLLIN)  # hang-ups are always reported
        (_, events), *_ = poll.poll()
        if not events & select.POLLIN:
            end_group(group)
    finally:
        os._exit(0)


def end_group(group: int) -> None:
    """End all processes of a group: the leader in order, then whatever is left.

    Args:
        group: Process group whose leader ends its engine when its pipe closes, or on SIGTERM.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGCONT)
        # An idle engine sees that nobody gives it commands any more; one at work needs a signal.
        _wait_until_gone(group, GRACE_S)
        with contextlib.suppress(ProcessLookupError):  # the leader may have left others behind
            os.kill(group, signal.SIGTERM)
        _wait_until_gone(group, STOP_TIMEOUT_S)
        os.killpg(group, signal.SIGKILL)


def _wait_until_gone(group: int, timeout_s: float) -> None:
    """Wait; raises ProcessLookupError once the group is empty."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        os.killpg(group, 0)
        time.sleep(POLL_S)
