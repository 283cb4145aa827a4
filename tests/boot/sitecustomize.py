# SPDX-License-Identifier: Apache-2.0
"""Every Python program of a test run imports this first: it collects garbage seldom.

Importing vLLM makes most of a million objects that stay. vLLM looks through all of them when an
engine starts and ends, and Python takes them apart one by one when the program ends: a third of
what a program with a small engine takes beside its imports. What tests themselves ask for is
collected.
"""

import atexit
import gc
import os
import sys

_collect = gc.collect


def collect(generation: int = 2) -> int:
    """``gc.collect``, unless it is vLLM that asks."""
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return 0 if caller.startswith("vllm.") else _collect(generation)


def leave_objects() -> None:
    """Let this program end without taking rings of objects apart; the system takes all memory.

    Registered first, so called last: what the program wanted to do at its end is done. Triton's
    bindings list every type that is left, hundreds of lines, so standard error is closed for them.
    """
    gc.freeze()
    if "triton" in sys.modules and sys.stderr is not None:
        sys.stderr.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)


gc.collect = collect
gc.set_threshold(100_000, 50, 100)
atexit.register(leave_objects)
